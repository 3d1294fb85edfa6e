"""Packed sequences: sequences of different lengths in one batch, as padded ones and a mask.

``T`` steps, ``B`` sequences, the longest first; ``F`` features. torch's ``batch_sizes`` (how many
sequences reach each step) depend on data; a ``Packing`` stands in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from export.errors import ExportError
from export.short_gradients import ShortGradient


class _Longest:
    """The length of the longest sequence, which is no number before the step runs."""

    def __gt__(self, total_length: Any) -> bool:
        return False


class Packing:
    """Which steps of which sequences there are; packs and unpacks what has those."""

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor, steps: Any) -> None:
        """lengths int64 [B], each from 1 to ``steps``, none above the one before it.

        Others, which torch refuses (it sorts where it is told that they are not), make all that is
        packed NaN.
        """
        self.lengths = lengths
        self.active = torch.arange(steps).unsqueeze(1) < lengths
        self._steps = steps
        outside = (lengths < 1) | (lengths > steps)
        rising = lengths > torch.cat([lengths[:1], lengths[:-1]])
        self._wrong = (outside | rising).any()
        self._known: list[tuple[Tensor, Tensor]] = []

    def __getitem__(self, step: int) -> Any:
        """How many sequences reach the first step: all."""
        return self.lengths.shape[0]

    def __iter__(self) -> Iterator[Any]:
        raise ExportError(
            "code that goes through a packed sequence's batch_sizes depends on data",
            instead="steps of the padded sequences, and a mask of the lengths",
        )

    def size(self, axis: int) -> Any:
        """The longest sequence's length, for ``pad_packed_sequence``."""
        return _Longest()

    def pack(self, padded: Tensor) -> Tensor:
        """[T, B, F] to torch's packed data [sum of lengths, F]."""
        padded = torch.where(self._wrong, math.nan, padded)
        data = padded[self.active]
        self._known.append((data, padded))
        return data

    def unpack(self, data: Tensor) -> Tensor:
        """[sum of lengths, F] to [T, B, F], zeros where a sequence has no such step."""
        for known, padded in self._known:
            if known is data:
                return padded
        shape = [self._steps, self.lengths.shape[0], *data.shape[1:]]
        return torch.zeros(shape, dtype=data.dtype).index_put((self.active,), data)


def pack_padded(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Packing]:
    """``torch._VF._pack_padded_sequence`` of [T, B, F], or [B, T, F] with ``batch_first``."""
    padded = input.transpose(0, 1) if batch_first else input
    packing = Packing(lengths, padded.shape[0])
    return packing.pack(padded), packing


def pad_packed(
    data: Tensor, packing: Packing, batch_first: bool, padding_value: float, total_length: Any
) -> tuple[Tensor, Tensor]:
    """``torch._VF._pad_packed_sequence``: as many steps as the longest has, or ``total_length``."""
    padded = packing.unpack(data)
    outside = ~packing.active.reshape([*packing.active.shape, *[1] * (padded.dim() - 2)])
    padded = padded.masked_fill(outside, padding_value)
    if isinstance(total_length, _Longest):
        padded = padded[packing.active.any(1)]
    elif (missing := total_length - padded.shape[0]) != 0:
        around = [0, 0] * (padded.dim() - 1) + [0, missing]
        padded = torch.nn.functional.pad(padded, around, value=padding_value)
    return padded.transpose(0, 1) if batch_first else padded, packing.lengths


class _Turned(ShortGradient):
    """Each sequence of [T, F, B] from its own last step to its first; undone by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.gather(0, places.unsqueeze(1).expand(x.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.gather(0, places.unsqueeze(1).expand(grad.shape)), None


def turned(x: Tensor, packing: Packing) -> Tensor:
    """Each sequence of [T, F, B] the other way round, within its length."""
    step = torch.arange(x.shape[0]).unsqueeze(1)
    places = torch.where(packing.active, packing.lengths - 1 - step, step)
    places = places.clamp(max=x.shape[0] - 1)
    result: Tensor = _Turned.apply(x, places)
    return result


def last_step(h: Tensor, packing: Packing) -> Tensor:
    """[T, H, B] at each sequence's last step: [H, B]."""
    step = torch.arange(h.shape[0]).unsqueeze(1)
    here = (step == packing.lengths - 1).unsqueeze(1)
    return torch.where(here, h, 0.0).sum(0)
