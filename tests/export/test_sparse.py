"""Sparse matrices that a step makes itself, with gradients of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.errors import ExportError
from tests.export.recorded import assert_as_torch, recorded


def _edges(n: int) -> tuple[Tensor, ...]:
    """3 n edges between n + 3 nodes, the last of which has none, and features of those.

    Several edges are between the same two nodes.
    """
    draw = torch.Generator().manual_seed(n)
    edges = torch.randint(0, n + 2, (2, 3 * n), generator=draw)
    edges[:, 1] = edges[:, 0]
    features = torch.randn(n + 3, 2, generator=draw)
    return edges, torch.rand(3 * n, generator=draw) + 0.5, features


def _products(edges: Tensor, values: Tensor, x: Tensor) -> list[Tensor]:
    n = x.shape[0]
    a = torch.sparse_coo_tensor(edges, values, (n, n))
    return [
        torch.sparse.mm(a, x),
        a.t() @ x,
        x.T @ a,
        a.matmul(x[:, 0]) + torch.mv(a.coalesce() * x.detach()[:, 1], x[:, 1]),
        torch.sparse.addmm(x, a, x, beta=0.5, alpha=2.0),
        a.to_dense() * x[:, :1],
    ]


def _normalised(edges: Tensor, values: Tensor, x: Tensor) -> list[Tensor]:
    """As convolutions over graphs weigh their edges, in ways that there are of it."""
    n = x.shape[0]
    a = torch.sparse.FloatTensor(edges, values, torch.Size([n, n])).coalesce()
    degree = torch.sparse.sum(a, dim=1).to_dense()
    scale = (1 + degree).rsqrt()
    rows, columns = a.indices()
    by_values = torch.sparse_coo_tensor(
        a.indices(), scale[rows] * a.values() * scale[columns], a.shape
    )
    by_products = a * scale.detach().unsqueeze(1).expand(n, n) * scale.detach()
    kept = a._values() > 0.8
    some = torch.sparse_coo_tensor(a._indices()[:, kept], (a.values() * a._values())[kept], (n, n))
    return [by_values @ x, torch.spmm(by_products, x), some @ x, torch.sparse.sum(a) * x]


def _arithmetic(edges: Tensor, values: Tensor, x: Tensor) -> list[Tensor]:
    n = x.shape[0]
    a = torch.sparse_coo_tensor(edges, values, (n, n), is_coalesced=False)
    both = a + a.transpose(0, 1) / 2 - 3 * -a
    dense = x @ x.T
    found = (x > 0).float().mul(x).to_sparse()
    return [
        both @ x,
        (dense * both).to_dense(),
        dense + a,
        torch.sparse.softmax(a, 1).to_dense(),
        torch.sparse.log_softmax(a, 0).values(),
        found.values().pow(2).sum() + found.t() @ x,
        torch.sparse.sum(a, 0).values().pow(2).sum(),
        a.detach().sum(0).to_dense() + a.sum(),
    ]


class _Special(torch.autograd.Function):
    """pyGAT's product, whose backward pass reads the sparse matrix again."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, values: Tensor, shape: Any, b: Tensor) -> Tensor:
        a = torch.sparse_coo_tensor(indices, values, shape)
        ctx.save_for_backward(a, b)
        ctx.n = shape[0]
        return torch.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        at = a._indices()[0, :] * ctx.n + a._indices()[1, :]
        return None, grad.matmul(b.t()).view(-1)[at], None, a.t().matmul(grad)


def _in_a_function(edges: Tensor, values: Tensor, x: Tensor) -> Tensor:
    n = x.shape[0]
    result: Tensor = _Special.apply(edges, values.exp(), torch.Size([n, n]), x)  # type: ignore[no-untyped-call]
    return result


FIXED = torch.sparse_coo_tensor(
    torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]]), torch.arange(4.0), (3, 3)
)


def _dropped(x: Tensor, kept: Tensor) -> list[Tensor]:
    """LightGCN's dropout of a constant's elements, and its arithmetic."""
    held = FIXED.to(x.device).coalesce()
    places, values = held.indices().t(), held.values()
    some = torch.sparse_coo_tensor(places[kept].t(), values[kept] / 0.8, held.size())
    return [some @ x, (2 * FIXED / 3).t() @ x, FIXED.T.to_dense() @ x]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_products, _normalised, _arithmetic, _in_a_function])
def test_matrices_of_edges(function: Callable[..., Any]) -> None:
    assert_as_torch(function, _edges)


def test_elements_of_a_constant() -> None:
    kept = torch.tensor([True, False, True])
    assert_as_torch(_dropped, lambda n: (torch.randn(3, n), kept))


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda a, x: (a @ a).to_dense(), "two sparse matrices"),
        (lambda a, x: a.values(), "not coalesced"),
        (lambda a, x: torch.relu(a).to_dense(), "'relu' of a sparse matrix"),
        (lambda a, x: a.index_select(0, torch.arange(2)) @ x, "'index_select'"),
        (lambda a, x: torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), x[:3, 0]), "rows"),
        (lambda a, x: _Given.apply(a, x), "given to _Given"),
    ],
)
def test_what_is_refused_by_name(refused: Callable[..., Tensor], said: str) -> None:
    def function(edges: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return refused(torch.sparse_coo_tensor(edges, values, (9, 9)), x)

    with pytest.raises(ExportError, match=said):
        recorded(function, _edges)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        return a @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class _Recommender(nn.Module):
    """LightGCN with dropout of edges, and edges whose weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(3, 4)
        self.weights = nn.Parameter(torch.rand(4))

    def forward(self, users: Tensor) -> Tensor:
        edges = FIXED._indices()
        kept = torch.rand(edges.shape[1]) < 0.8 if self.training else self.weights > -1
        a = torch.sparse.FloatTensor(edges[:, kept], self.weights[kept] / 0.8, FIXED.size())
        assert all(isinstance(each, torch.sparse.FloatTensor) for each in (a, FIXED))
        first = torch.sparse.mm(a, self.nodes.weight)
        second = torch.sparse.mm(FIXED, torch.tanh(first))
        return (first + second)[users]


def test_a_step_with_dropped_edges(assert_parity: Any) -> None:
    assert_parity(_Recommender(), {"users": torch.tensor([0, 2, 2, 1])})


def test_values_that_only_a_sparse_product_uses_are_trained(tmp_path: Path) -> None:
    model = nn.ParameterDict({"weights": torch.ones(2), "rows": torch.ones(3, 2)})
    edges = torch.tensor([[0, 2], [1, 2]])
    export.train_step(
        model,
        lambda m, b: (torch.sparse_coo_tensor(b["edges"], m["weights"], (3, 3)) @ m["rows"]).sum(),
        {"edges": edges},
        optimizer=export.Sgd(0.1),
        dynamic={},
        directory=tmp_path / "edges",
        verify=False,
    )
    trainer = Trainer(tmp_path / "edges")
    trainer.step({"edges": edges.numpy()})
    np.testing.assert_allclose(trainer.parameters["weights"], [0.8, 0.8], rtol=1e-6)
