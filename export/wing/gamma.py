"""The logarithm of the gamma function and its derivatives, which ONNX has not.

By Stirling's series at an argument that is raised to 8 and above, and by reflection below 1/2
(Abramowitz and Stegun 1964, 6.1.15, 6.1.17, 6.1.41, 6.3.7, 6.3.18, 6.4.7, 6.4.12). In double: the
terms are a hundred times larger than what is left of them near 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from export.lowering.registry import decomposes

_RAISED = 8


def _reflected(
    x: Tensor, above: Callable[[Tensor], Tensor], below: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``above`` of x from 1/2 on; ``below(x, above(1 - x))`` under it."""
    wide = x.to(torch.float64)
    low = wide < 0.5
    value = above(torch.where(low, 1 - wide, wide))
    # The angle within one period, which is exact.
    turn = wide - torch.round(wide)
    safe = torch.where(low, turn, 0.25)
    return torch.where(low, below(math.pi * safe, value), value).to(x.dtype)


def lgamma(x: Tensor) -> Tensor:
    """``torch.lgamma``: log |gamma(x)|, infinite at 0 and at negative whole numbers."""

    def above(x: Tensor) -> Tensor:
        product = x
        for k in range(1, _RAISED):
            product = product * (x + k)
        z = x + _RAISED
        r = 1 / (z * z)
        series = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r / 1680))) / z
        sum_of_large = (z - 0.5) * torch.log(z) - z + 0.5 * math.log(2 * math.pi) + series
        return torch.where(x < _LARGE, sum_of_large - torch.log(product), _stirling(x))

    def below(angle: Tensor, value: Tensor) -> Tensor:
        return math.log(math.pi) - torch.log(torch.abs(torch.sin(angle))) - value

    return _reflected(x, above, below)


# From here on nothing is raised: the product above would overflow in the end.
_LARGE = 1e6


def _stirling(x: Tensor) -> Tensor:
    return (x - 0.5) * torch.log(x) - x + 0.5 * math.log(2 * math.pi)


def digamma(x: Tensor) -> Tensor:
    """``torch.digamma``: the derivative of lgamma."""

    def above(x: Tensor) -> Tensor:
        total = 1 / x
        for k in range(1, _RAISED):
            total = total + 1 / (x + k)
        z = x + _RAISED
        r = 1 / (z * z)
        series = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r / 132))))
        return torch.log(z) - 0.5 / z - series - total

    def below(angle: Tensor, value: Tensor) -> Tensor:
        # onnxruntime has neither tangent nor cosine in double.
        return value - math.pi * torch.sin(angle + math.pi / 2) / torch.sin(angle)

    return _reflected(x, above, below)


def polygamma(n: int, x: Tensor) -> Tensor:
    """``torch.polygamma`` of order 0 (digamma) and 1, the derivative of digamma."""
    if n == 0:
        return digamma(x)
    if n != 1:
        return NotImplemented  # type: ignore[no-any-return]

    def above(x: Tensor) -> Tensor:
        total = 1 / (x * x)
        for k in range(1, _RAISED):
            total = total + 1 / ((x + k) * (x + k))
        z = x + _RAISED
        r = 1 / (z * z)
        series = (1 + r * (1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * 5 / 66))))) / z
        return series + 0.5 * r + total

    def below(angle: Tensor, value: Tensor) -> Tensor:
        sine = torch.sin(angle)
        return math.pi**2 / (sine * sine) - value

    return _reflected(x, above, below)


decomposes(
    {
        torch.ops.aten.lgamma.default: lgamma,
        torch.ops.aten.digamma.default: digamma,
        torch.ops.aten.polygamma.default: polygamma,
    }
)
