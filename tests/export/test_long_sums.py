"""Sums of many numbers are exact: onnxruntime's own add one number after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from tests.export.recorded import recorded

Shape = Callable[[int], tuple[int, ...]]

# The free axis is there only where the shape depends on n.
CASES: dict[str, tuple[Shape, Callable[[Tensor], Tensor]]] = {
    "all": (lambda n: (64, 8, 512), lambda x: x.sum()),
    "a mean of all": (lambda n: (64, 8, 512), lambda x: x.mean()),
    "a variance": (lambda n: (64, 8, 512), lambda x: x.var()),
    "one axis": (lambda n: (262144,), lambda x: x.mean()),
    "rows": (lambda n: (60000, 3), lambda x: x.sum(0)),
    "a column": (lambda n: (60000, 1), lambda x: x.sum(0, keepdim=True)),
    "long rows": (lambda n: (3, 400000), lambda x: x.mean(1)),
    "a middle axis": (lambda n: (2, 60000, 3), lambda x: x.sum(1, keepdim=True)),
    "all but channels": (lambda n: (9000, 3, 16), lambda x: x.sum((0, 2))),
    "variances": (lambda n: (60000, 3), lambda x: x.var(0, keepdim=True)),
    "rows by halves of odd length": (lambda n: (3, 20001, 3), lambda x: x.sum((0, 1))),
    "rows by a product": (lambda n: (128, 2, 64), lambda x: x.sum((0, 1))),
    "a mean of rows by a product": (lambda n: (128, 128), lambda x: x.mean(0, keepdim=True)),
    "free rows by a product": (lambda n: (n, 16, 256), lambda x: x.sum((0, 1), keepdim=True)),
    "free rows": (lambda n: (n, 8192, 3), lambda x: x.sum((0, 1))),
    "all of free rows": (lambda n: (n, 65536), lambda x: x.mean()),
    "free rows, flat": (lambda n: (n, 8192, 3), lambda x: x.reshape(-1, 3).sum(0)),
    "free rows, flat, a variance": (lambda n: (n, 65536), lambda x: x.reshape(-1).var()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_long_sum_is_exact(name: str) -> None:
    shape, summed = CASES[name]

    def make(n: int) -> list[Tensor]:
        return [torch.rand(shape(n), generator=torch.Generator().manual_seed(3)) + 0.5]

    model, _ = recorded(lambda x: summed(x.detach()), make)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (x,) = make(7)
    (got,) = session.run(None, {"batch.0": x.numpy()})
    exact = summed(x.double()).numpy()
    assert got.shape == exact.shape
    np.testing.assert_allclose(got, exact, rtol=6e-7)


def test_a_short_sum_is_one_node() -> None:
    model, _ = recorded(lambda x: x.detach().mean(), lambda n: [torch.rand(n, 64)])
    assert [node.op_type for node in model.graph.node] == ["ReduceMean"]


def test_rows_are_summed_by_a_product_where_onnxruntime_is_slow() -> None:
    def operators(*shape: int) -> list[str]:
        model, _ = recorded(lambda x: x.detach().sum(0), lambda n: [torch.rand(shape)])
        return [node.op_type for node in model.graph.node]

    assert "MatMul" in operators(256, 64)
    assert operators(32, 64) == operators(512, 64) == operators(64, 512) == ["ReduceSum"]
