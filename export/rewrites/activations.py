"""Activations whose gradient shares what the activation itself computed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import TRAINED
from export.short_gradients import ShortGradient

_HALF_ROOT = math.sqrt(0.5)
_LOG_ROOT_PI = 0.5 * math.log(math.pi)


class _Gelu(ShortGradient):
    """x Phi(x), Phi the normal distribution (Hendrycks and Gimpel 2016, equation 1).

    With u = x / sqrt(2) Phi is (1 + erf(u)) / 2, and the slope Phi + u exp(-u^2) / sqrt(pi).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        u = x * _HALF_ROOT
        share = torch.erf(u) * 0.5 + 0.5
        ctx.save_for_backward(u, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        u, share = ctx.saved_tensors
        slope: Tensor = grad * (share + u * torch.exp(-_LOG_ROOT_PI - u * u))
        return slope


_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


class _GeluByTanh(ShortGradient):
    """x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3): torch's approximation, as tanh is
    2 sigmoid(2 y) - 1. The slope is s (1 + (1 - s) x z'), s = sigmoid(z)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        factor = x * x * _CUBIC + _LINEAR
        share = torch.sigmoid(x * factor)
        ctx.save_for_backward(x, factor, share)
        return x * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, factor, share = ctx.saved_tensors
        along = x * (factor * 3 - 2 * _LINEAR)
        slope: Tensor = grad * (share * ((1 - share) * along + 1))
        return slope


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``."""
    kind: Any = {"none": _Gelu, "tanh": _GeluByTanh}.get(approximate)
    if kind is None:
        raise ValueError(f"approximate is {approximate!r}; expected 'none' or 'tanh'")
    result: Tensor = kind.apply(input)
    return result


TRAINED.equals({functional.gelu: gelu})
