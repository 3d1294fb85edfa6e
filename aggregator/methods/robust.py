"""Coordinate-wise robust means: no minority of devices decides a coordinate.

Source: Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates",
definitions 1 (median) and 2 (trimmed mean).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Within, require_declared
from device_sdk.methods.state import COUNT, Entry, RestoreError, State, Stateful, part, unpack
from device_sdk.wire.arrays.exchange import Scalar, Update

Robust = Literal["none", "trimmed", "median"]
TrimShare = Annotated[float, Within(0, 0.5, below=True)]
Multiple = Annotated[float, Within(1, or_zero=True)]
"""Of the fleet's median; 0 for no limit."""
Floats = NDArray[np.float64]

_SIGN = np.uint32(1 << 31)
_ALL = np.uint32(0xFFFFFFFF)
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 1 << 16
"""Coordinates of dense vectors that are sorted at a time."""


@dataclass(frozen=True, slots=True)
class RobustRule:
    """``none`` is the mean. ``trimmed`` leaves out the share ``trim_share`` of the values at either
    end, rounded down. ``median`` is the middle value, or the mean of the middle two.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    robust: Robust = "none"
    trim_share: TrimShare = 0.1

    def __post_init__(self) -> None:
        require_declared(self)

    @property
    def holds(self) -> bool:
        """Whether the round's updates must be kept until it closes."""
        return self.robust != "none"

    def cut(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of ``counts`` values are left out at either end."""
        if self.robust == "median":
            middle: NDArray[np.int64] = (counts - 1) // 2
            return middle
        share = self.trim_share if self.robust == "trimmed" else 0.0
        # A tenth of ten is one, whatever binary fractions make of it.
        return np.asarray(np.floor(counts * share + 1e-9), dtype=np.int64)

    def mean(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """The robust mean over the first axis of [devices, size], all devices alike: [size]."""
        devices = len(vectors)
        cut = int(self.cut(np.asarray([devices]))[0])
        parts = [
            np.sort(vectors[:, start : start + _BLOCK], axis=0)[cut : devices - cut].mean(
                axis=0, dtype=np.float64
            )
            for start in range(0, vectors.shape[1], _BLOCK)
        ]
        return np.concatenate(parts).astype(np.float32)


def touched_sums(
    cells: NDArray[np.int64], values: NDArray[np.float32], size: int, rule: RobustRule
) -> Floats:
    """The robust mean of each cell's values, times their number: float64 [size].

    Args:
        cells: int64 [n], 0 to ``size`` - 1; a cell that occurs often was touched by many.
        values: float32 [n], finite.
        size: number of cells, below 2^32. Cells that nobody touched are 0.
        rule: how the mean is taken.

    The result does not depend on the order of the entries.
    """
    totals = np.zeros(size, dtype=np.float64)
    if not len(cells):
        return totals
    # Sorting numbers that hold cell and value together is several times faster than a lexsort.
    keys = (cells.astype(np.uint64) << np.uint64(32)) | _ordered(values).astype(np.uint64)
    keys.sort()
    cell = (keys >> np.uint64(32)).astype(np.int64)
    value = _restored((keys & _LOW).astype(np.uint32)).astype(np.float64)
    starts = np.flatnonzero(np.concatenate([[True], cell[1:] != cell[:-1]]))
    counts = np.diff(np.append(starts, len(cell)))
    cuts = rule.cut(counts)
    place = np.arange(len(cell)) - np.repeat(starts, counts)
    kept = (place >= np.repeat(cuts, counts)) & (place < np.repeat(counts - cuts, counts))
    sums = np.add.reduceat(np.where(kept, value, 0.0), starts)
    totals[cell[starts]] = sums / (counts - 2 * cuts) * counts
    return totals


def _ordered(values: NDArray[np.float32]) -> NDArray[Any]:
    """uint32 that compare as the values do."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return bits ^ np.where(bits & _SIGN, _ALL, _SIGN)


def _restored(ordered: NDArray[Any]) -> NDArray[np.float32]:
    """The inverse of :func:`_ordered`."""
    bits = ordered ^ np.where(ordered & _SIGN, _SIGN, _ALL)
    return bits.view(np.float32)


# Updates that are held until their round closes, since a robust mean needs all of them at once.
#
# Memory and the checkpoint within a round grow with the round's updates: what is here is 4
# bytes a value and little else.

MOST_HELD_BYTES = 800_000_000
"""A round that holds more takes no further updates: a checkpoint is one SQLite blob, below 1 GB."""

_BLOCK_VALUES = 1 << 22

Floats32 = NDArray[np.float32]
Indices = NDArray[np.int64]


class HeldRows(Stateful):
    """Scatter's updates: [rows touched, columns drawn] each, in the order of their commits.

    ``shape``: [items, K] of the matrix that they are about.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._updates: list[tuple[NDArray[np.int32], NDArray[np.int32], Floats32]] = []
        self._values = 0

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def nbytes(self) -> int:
        return 4 * self._values

    def add(self, rows: Indices, columns: Indices, values: Floats32) -> None:
        """Hold copies: the caller's arrays may be views of a buffer that is used again."""
        self._updates.append((rows.astype(np.int32), columns.astype(np.int32), values.copy()))
        self._values += values.size

    def sums(self, rule: RobustRule) -> NDArray[np.float64]:
        """Of each cell the robust mean over those who touched it, times their number."""
        items, width = self._shape
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

    def restored(self, state: State) -> HeldRows:
        """Of this shape, what ``state()`` held; raises RestoreError where it does not fit."""
        held = HeldRows(self._shape)
        if not state:
            return held
        items, columns = self._shape
        found = unpack(
            {
                "rows": Entry(np.int32, ("touched",), least=0, below=items),
                "columns": Entry(np.int32, ("drawn",), least=0, below=columns),
                "sizes": Entry(np.int64, ("updates", 2), least=0),
                "values": Entry(np.float32, ("numbers",)),
            },
            state,
        )
        sizes = found.pop("sizes")
        ends = {
            "rows": sizes[:, 0].cumsum(),
            "columns": sizes[:, 1].cumsum(),
            "values": (sizes[:, 0] * sizes[:, 1]).cumsum(),
        }
        for name, end in ends.items():
            if len(end) == 0 or int(end[-1]) != len(found[name]):
                raise RestoreError(f"the held {name!r} and their sizes disagree")
        cut = [np.split(found[name], end[:-1]) for name, end in ends.items()]
        held._updates = [
            (rows, columns, values.reshape(len(rows), len(columns)))
            for rows, columns, values in zip(*cut, strict=True)
        ]
        held._values = len(found["values"])
        return held


class HeldVectors(Stateful):
    """Dense updates, float32 [size] each, in the order of their commits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._vectors: list[Floats32] = []

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def nbytes(self) -> int:
        return 4 * self._size * len(self._vectors)

    def add(self, vector: Floats32) -> None:
        """Hold a vector, which from now on belongs to this object."""
        self._vectors.append(vector)

    def mean(self, rule: RobustRule) -> Floats32:
        """The robust mean, float32 [size]. At least one vector must be held."""
        return rule.mean(np.stack(self._vectors))

    def state(self) -> dict[str, NDArray[Any]]:
        """``vectors`` float32 [updates, size]; nothing where none are held."""
        return {"vectors": np.stack(self._vectors)} if self._vectors else {}

    def restored(self, state: State) -> HeldVectors:
        """Of this size, what ``state()`` held; raises RestoreError where it does not fit."""
        held = HeldVectors(self._size)
        if state:
            schema = {"vectors": Entry(np.float32, ("updates", self._size))}
            held._vectors = list(unpack(schema, state)["vectors"])
        return held


def require_same_rule(held: int, participants: int, rule: RobustRule) -> None:
    """Raises RestoreError where an open round's updates were not kept as ``rule`` needs them."""
    if held != (participants if rule.holds else 0):
        raise RestoreError(
            "the state is of a round that was opened with another 'robust': set it back until that "
            "round is closed"
        )


# Updates that wait until enough is known of the fleet to judge them.

_MOST = 16
"""A few: they come of devices of which too few are known, and each is held whole."""


class Waiting(Stateful):
    """The first updates of a task's life, in the order of their commits."""

    def __init__(self) -> None:
        self._updates: list[Update] = []

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def full(self) -> bool:
        return len(self._updates) >= _MOST

    def add(self, update: Update) -> None:
        """Hold a copy: the caller's arrays may be views of a buffer that is used again."""
        copies = {name: array.copy() for name, array in update.tensors.items()}
        self._updates.append(Update(update.round_id, copies, update.metadata, update.sender))

    def take(self) -> Iterator[Update]:
        updates, self._updates = self._updates, []
        yield from updates

    def state(self) -> dict[str, NDArray[Any]]:
        """Of update i: ``i.round`` int64, ``i.sender`` uint8 of the sender's letters,
        ``i.tensor.*`` and, as scalars, ``i.said.*``; nothing where none waits."""
        found: dict[str, NDArray[Any]] = {}
        for place, update in enumerate(self._updates):
            found[f"{place}.round"] = np.asarray(update.round_id, dtype=np.int64)
            found[f"{place}.sender"] = np.frombuffer(update.sender.encode(), dtype=np.uint8)
            for name, array in update.tensors.items():
                found[f"{place}.tensor.{name}"] = array.copy()
            for name, value in update.metadata.items():
                found[f"{place}.said.{name}"] = np.asarray(value)
        return found

    def restored(self, state: State) -> Waiting:
        """What ``state()`` held; raises RestoreError for anything else."""
        found = Waiting()
        rest = dict(state)
        while rest:
            prefix = f"{len(found)}."
            own = part(prefix, rest)
            rest = {name: array for name, array in rest.items() if not name.startswith(prefix)}
            try:
                found._updates.append(_update(own))
            except (TypeError, ValueError) as error:
                raise RestoreError(f"an update that waits cannot be read: {error!r}") from None
        return found


def _update(own: State) -> Update:
    told = {name: array for name, array in own.items() if "." not in name}
    told = unpack({"round": COUNT, "sender": Entry(np.uint8, ("letters",))}, told)
    said: dict[str, Scalar] = {name: array.item() for name, array in part("said.", own).items()}
    tensors = {name: array.copy() for name, array in part("tensor.", own).items()}
    return Update(int(told["round"]), tensors, said, told["sender"].tobytes().decode())
