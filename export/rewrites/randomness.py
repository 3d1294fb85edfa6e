"""Reproducible random masks inside a graph: an integer hash of (seed, step, layer, index)."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer mixer on int64 tensors in [0, 2^32).

    The xor-shift-multiply of C. Wellons' hash prospector ("lowbias32"). Whole-number operators
    only, so that torch and onnxruntime agree bit for bit at any thread count.
    """
    x = x ^ torch.div(x, 1 << 16, rounding_mode="trunc")
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ torch.div(x, 1 << 15, rounding_mode="trunc")
    x = (x * 0x846CA68B) & _MASK
    return x ^ torch.div(x, 1 << 16, rounding_mode="trunc")


class Randomness:
    """Hands each call inside one train step its own stream.

    ``seed`` and ``step`` are int64 scalars; the order of the calls numbers the streams.
    """

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        self._seed = seed
        self._step = step
        self._calls = 0

    @property
    def used(self) -> bool:
        """Whether anything was drawn."""
        return self._calls > 0

    def keep_mask(self, shape: torch.Size | list[int], keep_probability: float) -> Tensor:
        """Bool tensor of ``shape``, True with ``keep_probability``, independent for each call."""
        self._calls += 1
        key = _mix((self._seed + 0x9E3779B9 * self._calls) & _MASK)
        key = _mix((key + self._step * 0x85EBCA77) & _MASK)
        elements = 1
        for size in shape:
            elements = elements * size
        index = torch.arange(elements, dtype=torch.int64)
        bits = _mix((index * 0x9E3779B1 + key) & _MASK)
        return (bits < round(keep_probability * 2**32)).reshape(shape)
