"""Draws from the seed (``export.rewrites.randomness``) in 32-bit unsigned arithmetic.

onnxruntime shifts, multiplies and compares these about four times as fast as 64-bit numbers that
are divided and masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

import export.rewrites.randomness as draws
from export.lowering.graph import Dim, Graph, Value, fixed
from export.lowering.registry import lowers

_KEYS = 64
"""So many calls' keys are computed as one vector: one by one, they would cost a node's overhead
20 times each."""


def _word(g: Graph, number: int | np.ndarray[Any, Any]) -> str:
    return g.constant(np.asarray(number & 0xFFFFFFFF, dtype=np.uint32))


def _as_word(g: Graph, number: Value | str) -> str:
    return g.op("Cast", number, to=TensorProto.UINT32)


def _shifted(g: Graph, x: str, places: int) -> str:
    return g.op("BitShift", x, _word(g, places), direction="RIGHT")


def _rounds(g: Graph, x: str) -> str:
    """``mix`` without its last xor."""
    for shift, factor in draws.ROUNDS:
        x = g.op("Mul", g.op("BitwiseXor", x, _shifted(g, x, shift)), _word(g, factor))
    return x


def _mix(g: Graph, x: str) -> str:
    x = _rounds(g, x)
    return g.op("BitwiseXor", x, _shifted(g, x, draws.LAST_SHIFT))


def _key(g: Graph, seed: Value, step: Value, call: int) -> str:
    """The key of one call, as a vector of one."""
    block, place = divmod(call - 1, _KEYS)
    calls = np.arange(block * _KEYS + 1, (block + 1) * _KEYS + 1, dtype=np.uint64)
    keys = _mix(g, g.op("Add", _as_word(g, seed), _word(g, calls * draws.CALL)))
    progress = g.op("Mul", _as_word(g, step), _word(g, draws.STEP))
    return g.op("Gather", _mix(g, g.op("Add", keys, progress)), g.ints([place]), axis=0)


def _count(g: Graph, sizes: Sequence[Dim], step: int | str) -> str:
    """The first prod(sizes) multiples of ``step``."""
    total = g.op("Squeeze", g.dim(math.prod(sizes)), g.ints([0]))
    number = g.op("Range", g.scalar(0, torch.int64), total, g.scalar(1, torch.int64))
    factor = _word(g, step) if isinstance(step, int) else step
    return g.op("Mul", _as_word(g, number), factor)


def _unmixed(g: Graph, seed: Value, step: Value, call: int, size: Sequence[Dim]) -> str:
    """key + ELEMENT i for each element i, as rows and columns: i = row * columns + column.

    A sum of two vectors, of which that of the columns is mostly a constant.
    """
    key = _key(g, seed, step, call)
    lead = next((i for i, each in enumerate(size) if fixed(each) != 1), 0) + 1
    rows, columns = size[:lead], size[lead:]
    if fixed(math.prod(columns)) == 1:
        return g.op("Add", _count(g, rows, draws.ELEMENT), key)
    width = g.op("Mul", _as_word(g, g.dim(math.prod(columns))), _word(g, draws.ELEMENT))
    down = g.op("Add", _count(g, rows, width), key)
    return g.op(
        "Add",
        g.op("Unsqueeze", down, g.ints([1])),
        _count(g, columns, draws.ELEMENT),
    )


@lowers(torch.ops.tessera.keep_mask.default)
def keep_mask(
    g: Graph, out: Any, seed: Value, step: Value, call: int, size: Sequence[Dim], below: int
) -> str:
    if below >= 2**32:
        return g.full(size, True, torch.bool)
    bits = _rounds(g, _unmixed(g, seed, step, call, size))
    # The last xor is with the number's own upper half: among numbers of one upper half it matters
    # only to those of the bound's, so that a constant does; and to none where the bound is a
    # multiple of what an upper half counts, as that of 1/2 is.
    if below % 2**draws.LAST_SHIFT:
        bits = g.op("BitwiseXor", bits, _word(g, below >> draws.LAST_SHIFT))
    return g.op("Reshape", g.op("Less", bits, _word(g, below)), g.shape(size))


@lowers(torch.ops.tessera.uniform.default)
def uniform(g: Graph, out: Any, seed: Value, step: Value, call: int, size: Sequence[Dim]) -> str:
    bits = _mix(g, _unmixed(g, seed, step, call, size))
    upper = g.op("Cast", _shifted(g, bits, 32 - draws.UNIFORM_BITS), to=TensorProto.FLOAT)
    drawn = g.op("Mul", upper, g.scalar(float(draws.UNIFORM_UNIT), torch.float32))
    drawn = g.op("Add", drawn, g.scalar(float(draws.UNIFORM_UNIT) / 2, torch.float32))
    return g.op("Reshape", drawn, g.shape(size))
