"""Sketches: 64 numbers that stand for thousands, keeping lengths and angles nearly as they are.

s = P d / sqrt(rows) with P of +1 and -1 (Johnson and Lindenstrauss; Achlioptas 2003, theorem 1.1).
Both ends draw the same P from a seed that the task publishes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLayout

__all__ = ["sketches"]

Floats = NDArray[np.float32]

# So many columns of P are in memory at once.
_COLUMNS = 4096


def sketches(vectors: NDArray[Any], layout: FlatLayout, seed: int, rows: int = 64) -> Floats:
    """One sketch for each parameter group of each vector.

    Args:
        vectors: [n, p] in ``layout``'s order; differences from a common point, as a rule.
        layout: where the groups lie.
        seed: of P, 0 to 2^63 - 1; the same for all who compare sketches.
        rows: numbers in a sketch, a multiple of 8.

    Returns float32 [n, groups, rows]. The expected squared length of a sketch is that of the
    group's part of the vector, with a relative deviation of sqrt(2 / rows). Raises ValueError for
    vectors of another length, or a seed or ``rows`` outside its range.
    """
    if vectors.ndim != 2 or vectors.shape[1] != layout.size:
        raise ValueError(f"the vectors are {vectors.shape}; expected [n, {layout.size}]")
    if rows < 8 or rows % 8:
        raise ValueError(f"rows is {rows}; expected a multiple of 8")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; expected 0 to 2^63 - 1")
    found = np.empty((len(vectors), len(layout.groups), rows), dtype=np.float32)
    for group, (start, end) in enumerate(layout.spans):
        total = np.zeros((len(vectors), rows), dtype=np.float64)
        for first, signs in _signs(seed, layout.groups[group], end - start, rows):
            part = vectors[:, start + first : start + first + len(signs)].astype(np.float64)
            total += part @ signs
        found[:, group] = total / math.sqrt(rows)
    return found


def _signs(seed: int, group: str, size: int, rows: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """P transposed, in blocks: the first column's number and +1 or -1, float64 [columns, rows].

    Bits of SHAKE-256, not of a numpy generator, whose streams may change between versions.
    """
    for block, first in enumerate(range(0, size, _COLUMNS)):
        columns = min(_COLUMNS, size - first)
        label = f"tessera sketch {seed} {group} {block}".encode()
        stream = hashlib.shake_256(label).digest(columns * rows // 8)
        bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8)).reshape(columns, rows)
        yield first, bits.astype(np.float64) * 2 - 1
