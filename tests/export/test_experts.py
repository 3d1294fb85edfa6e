"""Mixtures of experts as transformers computes them: counts, and products of groups of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.export.recorded import assert_as_torch

EXPERTS = 3


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _mixed(x: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
    number, order = scores.argmax(1).sort()
    count = torch.histc(number.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = count.cumsum(0, dtype=torch.int32)
    mixed: Tensor = functional.grouped_mm(x[order], weight.transpose(1, 2), offs=ends)
    return mixed


def test_rows_by_their_expert() -> None:
    assert_as_torch(
        _mixed, lambda n: (_numbers(n, 4), _numbers(EXPERTS, 8, 4), _numbers(n, EXPERTS) + n % 2)
    )


def test_counts_between_two_ends() -> None:
    assert_as_torch(lambda x: x.histc(5, -1, 0.5), lambda n: (_numbers(n, 9),))
