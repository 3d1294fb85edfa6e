"""Adaptive pooling of free sizes, and of images whose channels come last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import RECORDED

_Windows = tuple[Tensor, Tensor]
"""Along one axis of a size: where each window begins, and where it ends."""


def _wanted(output_size: Any, rank: int) -> list[int | None]:
    """The result's last sizes; None stands for the input's."""
    return list(output_size) if isinstance(output_size, Sequence) else [output_size] * rank


def _windows(size: Any, wanted: int) -> _Windows:
    place = torch.arange(wanted)
    begin = torch.div(place * size, wanted, rounding_mode="trunc")
    return begin, torch.div((place + 1) * size + (wanted - 1), wanted, rounding_mode="trunc")


def _inside(size: Any, windows: _Windows) -> Tensor:
    """[windows, size]: which places a window has."""
    begin, end = windows
    place = torch.arange(size)
    return (place >= begin.unsqueeze(1)) & (place < end.unsqueeze(1))


def _mean(x: Tensor, wanted: int) -> Tensor:
    """Means over the windows of the last axis."""
    size = x.shape[-1]
    begin, end = _windows(size, wanted)
    shares = _inside(size, (begin, end)) / (end - begin).unsqueeze(1)
    # Of rows: a product of all axes would ask about strides, which sizes decide.
    rows = x.contiguous().flatten(0, -2)
    return (rows @ shares.to(x.dtype).t()).reshape([*x.shape[:-1], wanted])


def _largest(x: Tensor, wanted: int | None) -> tuple[Tensor, Tensor]:
    """Maxima over the windows of the last axis, and the first place of each."""
    size = x.shape[-1]
    if wanted is None:
        return x, torch.arange(size).expand(x.shape)
    begin, end = _windows(size, wanted)
    seen = torch.where(_inside(size, (begin, end)), x.detach().unsqueeze(-2), -torch.inf)
    # Of -inf alone, the first place inside.
    place = torch.maximum(seen.argmax(-1), begin)
    return x.gather(-1, place), place


def _is_free(x: Tensor, rank: int) -> bool:
    return any(isinstance(size, torch.SymInt) for size in x.shape[-rank:])


def _average(torchs: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    def adaptive_avg_pool(input: Tensor, output_size: Any) -> Tensor:
        """torch's; ``input`` [..., c, sizes], result [..., c, ``output_size``]."""
        wanted = _wanted(output_size, rank)
        if not _is_free(input, rank) or set(wanted) == {1}:
            # torch would set a mean's strides over all places, where the channels come last.
            return torchs(input.contiguous(), output_size)
        for axis, want in zip(range(-rank, 0), wanted, strict=True):
            if want is not None:
                input = _mean(input.transpose(axis, -1), want).transpose(axis, -1)
        return input

    return adaptive_avg_pool


def _maximum(torchs: Callable[..., Any], rank: int, indices: bool) -> Callable[..., Any]:
    def adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        """torch's, the first of equal ones; ``input`` [..., c, sizes]."""
        if not _is_free(input, rank):
            return torchs(input, output_size, return_indices)
        wanted = _wanted(output_size, rank)
        # The last axis first: of equal ones in several rows the first row's.
        largest, flat, times = input, None, 1
        for axis in range(-1, -rank - 1, -1):
            largest, place = _largest(largest.transpose(axis, -1), wanted[axis])
            largest, place = largest.transpose(axis, -1), place.transpose(axis, -1)
            flat = place if flat is None else flat.gather(axis, place) + place * times
            times = times * input.shape[axis]
        return (largest, flat) if indices or return_indices else largest

    return adaptive_max_pool


def _maxima(rank: int) -> dict[Any, Callable[..., Any]]:
    alone = getattr(functional, f"adaptive_max_pool{rank}d")
    both = getattr(functional, f"adaptive_max_pool{rank}d_with_indices")
    return {alone: _maximum(alone, rank, False), both: _maximum(both, rank, True)}


RECORDED.equals(
    {
        functional.adaptive_avg_pool1d: _average(functional.adaptive_avg_pool1d, 1),
        functional.adaptive_avg_pool2d: _average(functional.adaptive_avg_pool2d, 2),
        functional.adaptive_avg_pool3d: _average(functional.adaptive_avg_pool3d, 3),
        **_maxima(1),
        **_maxima(2),
        **_maxima(3),
    }
)
