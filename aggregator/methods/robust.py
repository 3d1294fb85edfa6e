"""Coordinate-wise robust means: no minority of devices decides a coordinate.

Source: Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates",
definitions 1 (median) and 2 (trimmed mean).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.methods.state import Entry, RestoreError, State, Stateful, part, unpack
from device_sdk.wire.arrays.exchange import Update

Robust = Literal["none", "trimmed", "median"]
TrimShare = Annotated[float, Within(0, 0.5, below=True)]
Multiple = Annotated[float, Within(1, or_zero=True)]
"""Of the fleet's median; 0 for no limit."""
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Indices = NDArray[np.int64]

_SIGN = np.uint32(1 << 31)
_ALL = np.uint32(0xFFFFFFFF)
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 1 << 16
"""Coordinates of dense vectors that are sorted at a time."""
_BLOCK_VALUES = 1 << 22
"""Values of rows that are sorted at a time, about."""


@dataclass(frozen=True, slots=True)
class RobustRule(Declared):
    """``none`` is the mean. ``trimmed`` leaves out the share ``trim_share`` of the values at either
    end, rounded down. ``median`` is the middle value, or the mean of the middle two.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    robust: Robust = "none"
    trim_share: TrimShare = 0.1

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


def touched_means(
    updates: Iterable[tuple[Indices, Indices, Floats32]], shape: tuple[int, int], rule: RobustRule
) -> Floats:
    """Of each cell of a matrix ``shape`` [items, K] the robust mean over the updates that touched
    it, times their number: float64.

    ``updates``: each its rows and columns, rising, and its values [rows, columns]. Their order
    does not matter.
    """
    held = list(updates)
    items, width = shape
    blocks = max(1, -(-sum(values.size for _, _, values in held) // _BLOCK_VALUES))
    bounds = np.linspace(0, items, min(blocks, items) + 1).astype(np.int64)
    parts = []
    for first, end in pairwise(bounds.tolist()):
        cells, found = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
        for rows, columns, values in held:
            low, high = np.searchsorted(rows, (first, end))
            cells.append(((rows[low:high] - first)[:, None] * width + columns).reshape(-1))
            found.append(values[low:high].reshape(-1))
        size = (end - first) * width
        sums = touched_sums(np.concatenate(cells), np.concatenate(found), size, rule)
        parts.append(sums.reshape(end - first, width))
    return np.concatenate(parts)


# Updates that are kept whole: until their round closes, because a robust mean needs all of them at
# once, or nothing is known yet that they could be judged by; or longer, a device's last one.
#
# Memory and the checkpoint within a round grow with them.

MOST_HELD_BYTES = 800_000_000
"""A round that holds more takes no further updates: a checkpoint is one SQLite blob, below 1 GB."""


def _nothing(update: Update) -> int:
    return 0


class HeldUpdates(Stateful):
    """Updates, whole, in the order in which they came, whatever each of them holds.

    Args:
        unfolded: the bytes that an update takes beside its own tensors while the round is judged.
    """

    def __init__(self, unfolded: Callable[[Update], int] = _nothing) -> None:
        self._unfolded = unfolded
        self._updates: list[Update] = []
        self._whose: set[tuple[str, int]] = set()
        self.nbytes = 0
        """Of their tensors, and what these unfold to."""

    def __len__(self) -> int:
        return len(self._updates)

    def __iter__(self) -> Iterator[Update]:
        return iter(self._updates)

    @property
    def full(self) -> bool:
        """Whether as many are held as memory is set aside for."""
        return self.nbytes > MOST_HELD_BYTES

    def emptied(self) -> HeldUpdates:
        """As these were before anything was held."""
        return HeldUpdates(self._unfolded)

    def has(self, sender: str, round_id: int) -> bool:
        """Whether an update of this device and round is held."""
        return (sender, round_id) in self._whose

    def add(self, update: Update) -> None:
        """Hold a copy: the caller's arrays may be views of a buffer that is used again."""
        copies = {name: array.copy() for name, array in update.tensors.items()}
        self._hold(Update(update.round_id, copies, update.metadata, update.sender, age=update.age))

    def _hold(self, update: Update) -> None:
        self._updates.append(update)
        self._whose.add((update.sender, update.round_id))
        self.nbytes += sum(array.nbytes for array in update.tensors.values())
        self.nbytes += self._unfolded(update)

    def state(self) -> dict[str, NDArray[Any]]:
        """See :func:`pack_updates`."""
        return pack_updates(self._updates)

    def restored(self, state: State) -> HeldUpdates:
        """What ``state()`` held; raises RestoreError for anything else."""
        found = self.emptied()
        for update in unpack_updates(state):
            found._hold(update)
        return found


class LastUpdates(Stateful):
    """Of each device the last update, in the order in which the devices were first heard of."""

    def __init__(self) -> None:
        self._by_sender: dict[str, Update] = {}

    def __len__(self) -> int:
        return len(self._by_sender)

    def __iter__(self) -> Iterator[Update]:
        return iter(self._by_sender.values())

    def __contains__(self, sender: str) -> bool:
        return sender in self._by_sender

    def __getitem__(self, sender: str) -> Update:
        return self._by_sender[sender]

    def put(self, update: Update) -> None:
        """Keep a copy, in the place of an earlier one of the same device."""
        copies = {name: array.copy() for name, array in update.tensors.items()}
        kept = Update(update.round_id, copies, update.metadata, update.sender)
        self._by_sender[update.sender] = kept

    def drop(self, sender: str) -> None:
        """Forget the device, where it is known."""
        self._by_sender.pop(sender, None)

    def state(self) -> dict[str, NDArray[Any]]:
        """See :func:`pack_updates`."""
        return pack_updates(list(self))

    def restored(self, state: State) -> LastUpdates:
        """What ``state()`` held; raises RestoreError for anything else."""
        found, updates = LastUpdates(), unpack_updates(state)
        found._by_sender = {update.sender: update for update in updates}
        if len(found) < len(updates):
            raise RestoreError("the state names a device twice")
        return found


def pack_updates(updates: Sequence[Update]) -> dict[str, NDArray[Any]]:
    """Updates as few arrays: ``said``, of each its round, sender, metadata and, above 0, its age,
    as JSON in uint8 [bytes]. Of the tensors of one name, dtype and rank, ``NAME|DTYPE|RANK``:
    ``values.*``, all end to end, their ``shapes.*`` int64 [tensors, axes] and ``places.*`` int64
    [tensors], whose they are."""
    said = [
        [each.round_id, each.sender, dict(each.metadata), *([each.age] if each.age else [])]
        for each in updates
    ]
    packed = json.dumps(said).encode()
    found: dict[str, NDArray[Any]] = {"said": np.frombuffer(packed, dtype=np.uint8).copy()}
    alike: dict[str, list[tuple[int, NDArray[Any]]]] = {}
    for place, update in enumerate(updates):
        for name, array in update.tensors.items():
            kind = f"{name}|{array.dtype}|{array.ndim}"
            alike.setdefault(kind, []).append((place, array))
    for kind, each in alike.items():
        arrays = [array for _, array in each]
        found[f"values.{kind}"] = np.concatenate([array.reshape(-1) for array in arrays])
        shapes = np.asarray([array.shape for array in arrays], dtype=np.int64)
        found[f"shapes.{kind}"] = shapes.reshape(len(arrays), -1)
        found[f"places.{kind}"] = np.asarray([place for place, _ in each], dtype=np.int64)
    return found


def unpack_updates(state: State) -> list[Update]:
    """The inverse of :func:`pack_updates`; raises RestoreError."""
    values, shapes, places = (part(f"{each}.", state) for each in _OF_TENSORS)
    if not shapes.keys() == places.keys() == values.keys():
        raise RestoreError("the held updates' arrays are expected to go together")
    own = {n: a for n, a in state.items() if n.partition(".")[0] not in _OF_TENSORS}
    told = unpack({"said": Entry(np.uint8, ("bytes",))}, own)["said"]
    try:
        said = list(json.loads(told.tobytes()))
        tensors: list[dict[str, NDArray[Any]]] = [{} for _ in said]
        for kind, array in values.items():
            name = kind.partition("|")[0]
            for place, each in _apart(kind, array, shapes[kind], places[kind], len(said)):
                tensors[place][name] = each
        return [
            Update(round_id, own_tensors, metadata, sender, age=next(iter(age), None))
            for own_tensors, (round_id, sender, metadata, *age) in zip(tensors, said, strict=True)
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise RestoreError(f"a held update cannot be read: {error!r}") from None


_OF_TENSORS = ("values", "shapes", "places")


def _apart(
    kind: str, values: NDArray[Any], shapes: NDArray[Any], places: NDArray[Any], count: int
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Arrays that lie end to end in ``values``, each with the place of its update."""
    named = {"shapes": shapes, "places": places}
    schema = {
        "shapes": Entry(np.int64, ("tensors", "axes"), least=0),
        "places": Entry(np.int64, ("tensors",), least=0, below=count),
    }
    unpack(schema, named)
    sizes = [math.prod(shape) for shape in shapes.tolist()]
    sound = f"{values.dtype}|{shapes.shape[1]}" == kind.partition("|")[2] and values.ndim == 1
    if not sound or sum(sizes) != len(values) or len(set(places.tolist())) != len(places):
        raise RestoreError(f"the held {kind!r} and their shapes disagree")
    for place, shape, each in zip(
        places.tolist(), shapes.tolist(), np.split(values, np.cumsum(sizes)[:-1]), strict=True
    ):
        yield place, each.reshape(shape)
