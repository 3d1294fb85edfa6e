"""Functions whose gradients are written by hand, beside torch's own in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites.attention import plain_attention as attention
from export.rewrites.losses import cross_entropy
from export.rewrites.normalisation import gelu

QUERIES, KEYS = 5, 7


def _masks() -> dict[str, Tensor | None]:
    seen = torch.rand(QUERIES, KEYS) > 0.4
    seen[2] = False  # This query may look at nothing.
    each = torch.rand(2, 1, 1, KEYS) > 0.4
    each[0] = False
    numbers = torch.randn(QUERIES, KEYS, dtype=torch.float64)
    learnt = torch.randn(1, 4, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    return {"none": None, "bool": seen, "samples": each, "numbers": numbers, "learnt": learnt}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["none", "bool", "samples", "numbers", "learnt", "causal"])
def test_attention(name: str, grouped: bool) -> None:
    torch.manual_seed(0)
    mask = _masks().get(name)
    causal = name == "causal"
    heads, keys = 2 if grouped else 4, QUERIES if causal else KEYS

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    query, key, value = draw(2, 4, QUERIES, 3), draw(2, heads, keys, 3), draw(2, heads, keys, 6)
    named: dict[str, Any] = {"is_causal": causal, "scale": 0.7, "enable_gqa": grouped}
    expected = functional.scaled_dot_product_attention(query, key, value, mask, **named)
    got = attention(query, key, value, mask, **named, drop=lambda shape, like: (None, 1.0))
    torch.testing.assert_close(got, expected)
    inputs = [query, key, value, *([mask] if mask is not None and mask.requires_grad else [])]
    direction = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("keys", [3, 64], ids=["few keys", "many keys"])
def test_attention_with_dropout_is_its_factors_gradient(keys: int) -> None:
    torch.manual_seed(0)
    drawn = (torch.rand(2, 4, keys) > 0.3).to(torch.float64), 1 / 0.7

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, None, False, None, False, lambda shape, like: drawn)

    shapes = ((2, 4, 2), (2, keys, 2), (2, keys, 5))
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    x = torch.linspace(-12, 12, 401, dtype=torch.float64, requires_grad=True)
    expected = functional.gelu(x, approximate=approximate)
    got = gelu(x, approximate=approximate)
    torch.testing.assert_close(got, expected)
    (ours,), (theirs,) = (torch.autograd.grad(y.sum(), x) for y in (got, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, smoothing: float) -> None:
    torch.manual_seed(0)
    target = torch.tensor([[0, 3], [-100, 1], [2, -100]])
    weight = torch.rand(4, dtype=torch.float64)
    logits = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    named: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    expected = functional.cross_entropy(logits, target, weight, **named)
    got = cross_entropy(logits, target, weight, **named)
    torch.testing.assert_close(got, expected)
    (ours,), (theirs,) = (torch.autograd.grad(y.sum(), logits) for y in (got, expected))
    torch.testing.assert_close(ours, theirs)


def test_infinite_logits_of_other_classes_count_as_in_torch() -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0], [-math.inf, 0.5, 0.1]], requires_grad=True)
    target = torch.tensor([1, -100])
    expected = functional.cross_entropy(logits, target)
    got = cross_entropy(logits, target)
    torch.testing.assert_close(got, expected)
    (ours,), (theirs,) = (torch.autograd.grad(y, logits) for y in (got, expected))
    torch.testing.assert_close(ours, theirs)
