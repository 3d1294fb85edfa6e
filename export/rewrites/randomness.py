"""Random numbers as functions of the run-time seed, the step and the element's number.

A call's key is ``mix(mix(seed + 0x9E3779B9 call) + 0x85EBCA77 step)``, the bits of its element i
``mix(key + 0x9E3779B1 i)``, all modulo 2^32, where ``mix`` is the xor-shift-multiply of C.
Wellons' hash prospector ("lowbias32"). Whole-number arithmetic only, so that torch and onnxruntime
agree bit for bit at any thread count.

torch lacks 32-bit unsigned arithmetic, so the draws are operators of their own: here in numpy, in
``export.lowering.randomness`` as ONNX nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CALL, STEP, ELEMENT = 0x9E3779B9, 0x85EBCA77, 0x9E3779B1
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Of ``mix``: each an xor with the number shifted right, and a product. Then ``LAST_SHIFT``."""
LAST_SHIFT = 16

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


def _mix(x: Words) -> Words:
    for shift, factor in ROUNDS:
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(LAST_SHIFT)
    return x


def _bits(seed: Tensor, step: Tensor, call: int, size: Sequence[int]) -> Words:
    words = [np.array([number & 0xFFFFFFFF], np.uint32) for number in (int(seed), int(step))]
    key = _mix(words[0] + np.uint32(CALL * call & 0xFFFFFFFF))
    key = _mix(key + words[1] * np.uint32(STEP))
    number = np.arange(math.prod(size), dtype=np.uint32)
    number *= np.uint32(ELEMENT)
    number += key
    return _mix(number).reshape(size)


@torch.library.custom_op("tessera::keep_mask", mutates_args=())
def keep_mask(seed: Tensor, step: Tensor, call: int, size: Sequence[int], below: int) -> Tensor:
    """Bool [size]: whether an element's bits are less than ``below``, a number up to 2^32."""
    bits = _bits(seed, step, call, size)
    return torch.from_numpy(bits < below if below < 2**32 else np.full(bits.shape, True))


@keep_mask.register_fake
def _(seed: Tensor, step: Tensor, call: int, size: Sequence[int], below: int) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


class Randomness:
    """Hands each call inside one train step its own stream.

    ``seed`` and ``step`` are int64 scalars; the order of the calls numbers the streams.
    """

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        self._seed = seed
        self._step = step
        self._calls = 0

    def keep_mask(self, shape: Sequence[int], keep_probability: float) -> Tensor:
        """Bool tensor of ``shape``, True with ``keep_probability``, independent for each call."""
        self._calls += 1
        below = round(keep_probability * 2**32)
        mask: Tensor = keep_mask(self._seed, self._step, self._calls, list(shape), below)
        return mask
