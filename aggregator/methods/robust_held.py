"""Updates that are held until their round closes, since a robust mean needs all of them at once.

Memory and the checkpoint within a round grow with the round's updates: what is here is 4 bytes a
value and little else.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import StateError
from aggregator.methods.robust import RobustRule, touched_sums

__all__ = ["MOST_HELD_BYTES", "HeldRows", "HeldVectors", "require_same_rule"]

MOST_HELD_BYTES = 800_000_000
"""A round that holds more takes no further updates: a checkpoint is one SQLite blob, below 1 GB."""

_BLOCK_VALUES = 1 << 22
_ROWS = {"rows": np.int32, "columns": np.int32, "sizes": np.int64, "values": np.float32}

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
State = Mapping[str, NDArray[Any]]


class HeldRows:
    """Scatter's updates: [rows touched, columns drawn] each, in the order of their commits."""

    def __init__(self) -> None:
        self._updates: list[tuple[NDArray[np.int32], NDArray[np.int32], Floats]] = []
        self._values = 0

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        return 4 * self._values

    def add(self, rows: Indices, columns: Indices, values: Floats) -> None:
        """Hold copies: the caller's arrays may be views of a buffer that is used again."""
        self._updates.append((rows.astype(np.int32), columns.astype(np.int32), values.copy()))
        self._values += values.size

    def sums(self, shape: tuple[int, int], rule: RobustRule) -> NDArray[np.float64]:
        """Of each cell the robust mean over those who touched it, times their number."""
        items, width = shape
        blocks = max(1, -(-self._values // _BLOCK_VALUES))
        bounds = np.linspace(0, items, min(blocks, items) + 1).astype(np.int64)
        parts = [self._block(int(first), int(end), width, rule) for first, end in pairwise(bounds)]
        return np.concatenate(parts)

    def _block(self, first: int, end: int, width: int, rule: RobustRule) -> NDArray[np.float64]:
        cells, values = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
        for rows, columns, block in self._updates:
            low, high = np.searchsorted(rows, (first, end))
            within = rows[low:high].astype(np.int64) - first
            cells.append((within[:, None] * width + columns).reshape(-1))
            values.append(block[low:high].reshape(-1))
        size = (end - first) * width
        sums = touched_sums(np.concatenate(cells), np.concatenate(values), size, rule)
        return sums.reshape(end - first, width)

    def state(self) -> dict[str, NDArray[Any]]:
        """All updates end to end: ``rows`` and ``columns`` int32, ``values`` float32, and ``sizes``
        int64 [updates, 2], their numbers of rows and columns. Nothing where none are held."""
        if not self._updates:
            return {}
        rows, columns, values = zip(*self._updates, strict=True)
        return {
            "rows": np.concatenate(rows),
            "columns": np.concatenate(columns),
            "sizes": np.asarray([one.shape for one in values], dtype=np.int64),
            "values": np.concatenate([one.reshape(-1) for one in values]),
        }

    @classmethod
    def from_state(cls, shape: tuple[int, int], state: State) -> HeldRows:
        """What ``state()`` held; raises StateError where it does not fit [items, K]."""
        held = cls()
        if not state:
            return held
        if set(state) != set(_ROWS):
            raise StateError(f"the held updates are {sorted(state)}; expected {sorted(_ROWS)}")
        sizes = state["sizes"]
        for name, dtype in _ROWS.items():
            if state[name].dtype != dtype or state[name].ndim != (2 if name == "sizes" else 1):
                raise StateError(f"the held {name!r} are {state[name].dtype}, not {dtype.__name__}")
        if sizes.shape[1] != 2 or (sizes < 0).any():
            raise StateError("the held updates' sizes are no pairs of counts")
        ends = {
            "rows": sizes[:, 0].cumsum(),
            "columns": sizes[:, 1].cumsum(),
            "values": (sizes[:, 0] * sizes[:, 1]).cumsum(),
        }
        for name, end in ends.items():
            if len(end) == 0 or int(end[-1]) != len(state[name]):
                raise StateError(f"the held {name!r} and their sizes disagree")
        for name, bound in (("rows", shape[0]), ("columns", shape[1])):
            if len(state[name]) and not 0 <= state[name].min() <= state[name].max() < bound:
                raise StateError(f"the held {name!r} lie outside 0 to {bound - 1}")
        cut = {name: np.split(state[name], end[:-1]) for name, end in ends.items()}
        for place, size in enumerate(sizes.tolist()):
            values = cut["values"][place].reshape(size).copy()
            held._updates.append((cut["rows"][place].copy(), cut["columns"][place].copy(), values))
        held._values = len(state["values"])
        return held


class HeldVectors:
    """Dense updates, float32 [size] each, in the order of their commits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._vectors: list[Floats] = []

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 4 * self._size * len(self._vectors)

    def add(self, vector: Floats) -> None:
        """Hold a vector, which from now on belongs to this object."""
        self._vectors.append(vector)

    def mean(self, rule: RobustRule) -> Floats:
        """The robust mean, float32 [size]. At least one vector must be held."""
        return rule.mean(np.stack(self._vectors))

    def state(self) -> dict[str, NDArray[Any]]:
        """``vectors`` float32 [updates, size]; nothing where none are held."""
        return {"vectors": np.stack(self._vectors)} if self._vectors else {}

    @classmethod
    def from_state(cls, size: int, state: State) -> HeldVectors:
        """What ``state()`` held; raises StateError where it does not fit."""
        held = cls(size)
        if not state:
            return held
        vectors = state.get("vectors")
        if set(state) != {"vectors"} or vectors is None:
            raise StateError(f"the held updates are {sorted(state)}; expected vectors")
        if vectors.dtype != np.float32 or vectors.ndim != 2 or vectors.shape[1] != size:
            raise StateError(
                f"the held updates are {vectors.dtype} {vectors.shape}; expected float32 of "
                f"[updates, {size}]"
            )
        held._vectors = [one.copy() for one in vectors]
        return held


def require_same_rule(held: int, participants: int, rule: RobustRule) -> None:
    """Raises StateError where an open round's updates were not kept as ``rule`` needs them."""
    if held != (participants if rule.holds else 0):
        raise StateError(
            "the state is of a round that was opened with another 'robust': set it back until that "
            "round is closed"
        )
