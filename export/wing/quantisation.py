"""Fake quantisation in training: values rounded to a grid, gradients straight through it.

``torch.ao.quantization``'s modules read their own switches and ranges while they run; here those
stay tensors, so that observers' ranges are state of the step like batch norm's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import FakeQuantize
from torch.ao.quantization import observer as observers

from export.errors import ExportError
from export.rewrites import BESIDE, RECORDED
from export.short_gradients import ShortGradient

# The smallest scale that torch's observers in C++ set.
_LEAST_SCALE = 6.1e-5


class _Rounded(ShortGradient):
    """(clamp(round(x / scale) + zero) - zero) * scale; the gradient passes inside the range."""

    plain = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
        place = torch.round(x * (1 / scale)) + zero
        ctx.save_for_backward((place >= low) & (place <= high))
        return (place.clamp(low, high) - zero) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grad, 0.0), None, None, None, None


def _rounded(x: Tensor, scale: Any, zero: Any, low: int, high: int) -> Tensor:
    scale, zero = (torch.as_tensor(each).detach().to(x.dtype) for each in (scale, zero))
    result: Tensor = _Rounded.apply(x, scale, zero, low, high)
    return result


def _along(values: Tensor, axis: int, rank: int) -> Tensor:
    return values.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def per_tensor(
    input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Tensor:
    """``torch.fake_quantize_per_tensor_affine``."""
    if isinstance(scale, Tensor):
        scale, zero_point = scale.reshape(()), torch.as_tensor(zero_point).reshape(())
    return _rounded(input, scale, zero_point, quant_min, quant_max)


def per_channel(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """``torch.fake_quantize_per_channel_affine``."""
    own, zero = (_along(each, axis, input.dim()) for each in (scale, zero_point))
    return _rounded(input, own, zero, quant_min, quant_max)


def _grid(low: Tensor, high: Tensor, first: int, last: int, even: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range, as torch's fused observer chooses them."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    symmetric = (low < 0) & (high > 0) if even else torch.zeros_like(low, dtype=torch.bool)
    half = (last - first) // 2
    widest = torch.maximum((low / -(half + 1)).abs(), (high / half).abs())
    low = torch.where(symmetric, -widest * (half + 1), low)
    high = torch.where(symmetric, widest * half, high)
    scale = (high - low) / (last - first)
    scale = torch.where(scale == 0, 0.1, scale)
    tiny = scale < _LEAST_SCALE
    scale = torch.where(tiny, _LEAST_SCALE, scale)
    at_low, at_high = first - low / scale, last - high / scale
    nearer = abs(first) + (low / scale).abs() < abs(last) + (high / scale).abs()
    zero = torch.where(nearer, at_low, at_high)
    zero = torch.where(symmetric, float((first + last + 1) // 2), zero)
    return scale, torch.round(zero.clamp(first, last))


def observed(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Tensor:
    """``torch.fused_moving_avg_obs_fake_quant``: observes, sets the grid and rounds to it."""
    rows = x.shape[ch_axis] if per_row_fake_quant else 1
    if running_min.numel() != rows:
        raise _without_ranges()
    seen = x.detach()
    if per_row_fake_quant:
        seen = seen.movedim(ch_axis, 0).reshape(rows, -1)
        least, most = seen.amin(1), seen.amax(1)
    else:
        least, most = (each.reshape(running_min.shape) for each in (seen.amin(), seen.amax()))
    watch = observer_on.reshape(-1)[0] == 1
    for held, now in ((running_min, least), (running_max, most)):
        moved = torch.where(held.isinf(), now, held + averaging_const * (now - held))
        held.copy_(torch.where(watch, moved, held))
    new_scale, new_zero = _grid(running_min, running_max, quant_min, quant_max, symmetric_quant)
    for held, now in ((scale, new_scale), (zero_point, new_zero)):
        held.copy_(torch.where(watch, now.reshape(held.shape).to(held.dtype), held))
    if per_row_fake_quant:
        rounded = per_channel(x, scale, zero_point, ch_axis, quant_min, quant_max)
    else:
        rounded = per_tensor(x, scale, zero_point, quant_min, quant_max)
    return torch.where(fake_quant_on.reshape(-1)[0] == 1, rounded, x)


def _ranges(observer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """An observer's least and largest value once it has seen ``x``, as torch's own keeps them."""
    low, high = observer.min_val, observer.max_val
    if low.dim() == 0:
        least, most = x.amin(), x.amax()
    else:
        rows = x.movedim(observer.ch_axis, 0).flatten(1)
        least, most = rows.amin(1), rows.amax(1)
    if not isinstance(observer, _MOVING):
        return torch.minimum(least, low), torch.maximum(most, high)
    share = observer.averaging_constant
    fresh = low.isinf() & high.isinf() if low.dim() == 0 else torch.zeros((), dtype=torch.bool)
    return (
        torch.where(fresh, least, low + share * (least - low)),
        torch.where(fresh, most, high + share * (most - high)),
    )


_MOVING = (observers.MovingAverageMinMaxObserver, observers.MovingAveragePerChannelMinMaxObserver)
_OBSERVERS = (observers.MinMaxObserver, observers.PerChannelMinMaxObserver)


def _apart(self: FakeQuantize, X: Tensor) -> Tensor:
    """``FakeQuantize.forward``: observer, grid and rounding apart, its switches read as tensors."""
    observer: Any = self.activation_post_process
    ranges = isinstance(observer, _OBSERVERS)
    if not ranges and not isinstance(observer, observers.FixedQParamsObserver):
        raise ExportError(
            f"its {type(observer).__name__} branches on its buffers",
            instead="a MinMaxObserver or MovingAverageMinMaxObserver, each also per channel, or "
            "torch.ao.quantization.FusedMovingAvgObsFakeQuantize",
        )
    if ranges:
        watch = self.observer_enabled.reshape(-1)[0] == 1
        if observer.min_val.numel() == 0:
            raise _without_ranges()
        low, high = _ranges(observer, X.detach().to(observer.min_val.dtype))
        scale, zero = observer._calculate_qparams(low.reshape(-1), high.reshape(-1))
        if scale.shape != self.scale.shape:
            raise _without_ranges()
        held = (observer.min_val, observer.max_val, self.scale, self.zero_point)
        for old, new in zip(held, (low, high, scale, zero), strict=True):
            old.copy_(torch.where(watch, new.to(old.dtype), old))
    ends = observer.quant_min, observer.quant_max
    if self.is_per_channel:
        rounded = per_channel(X, self.scale, self.zero_point, self.ch_axis, *ends)
    else:
        rounded = per_tensor(X, self.scale, self.zero_point, *ends)
    return torch.where(self.fake_quant_enabled.reshape(-1)[0] == 1, rounded, X)


def _without_ranges() -> ExportError:
    return ExportError(
        "an observer without ranges yet",
        operator="fake quantisation",
        instead="one call of the model on an example in training mode before the export",
    )


for _table in (RECORDED, BESIDE):  # torch's own exist in float32 only
    _table.equals(
        {
            torch.fake_quantize_per_tensor_affine: per_tensor,
            torch.fake_quantize_per_channel_affine: per_channel,
            torch.fused_moving_avg_obs_fake_quant: observed,
        }
    )
# torch's own modules, which read their switches and ranges while they run.
RECORDED.replaces(
    (FakeQuantize, "forward", _apart),
    (observers, "check_min_max_valid", lambda low, high: True),
)
