"""What is usual in a fleet: how large updates are, by medians over devices with one voice each.

Limits are multiples of it (:mod:`aggregator.methods.bounds`); outliers are what is far above it.
"""

from __future__ import annotations

import math
import struct
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.sums import Additive, RefusedShare
from device_sdk.methods.state import COUNT, Entry, RestoreError, State, part, prefixed, unpack

Floats = NDArray[np.float64]
Squares = NDArray[np.float32] | NDArray[np.float64]

_SHORT = 4096
"""Values of a row whose float32 sum is good to four digits: limits are multiples of what is
usual."""


def clip_factor(values: NDArray[Any], limit: float) -> float:
    """The factor, at most 1, that brings the Euclidean norm of ``values`` down to ``limit``.

    ``limit`` 0 means no limit. The norm is taken in float64: squares of finite float32 values
    cannot overflow there.
    """
    if limit == 0 or values.size == 0:
        return 1.0
    norm = euclidean_norm(values)
    return 1.0 if norm <= limit else limit / norm


def euclidean_norm(values: NDArray[Any]) -> float:
    """The norm of all of ``values``, taken in float64."""
    flat = values.reshape(-1).astype(np.float64)
    return math.sqrt(float(flat @ flat))


class Measured(NamedTuple):
    """How large an update [rows, columns] is. ``norm`` is Euclidean, over all values.

    A row's size is its root mean square: comparable whatever the number of columns. Of the rows
    ``median_row`` is the lower of two in the middle; both are 0 without rows.
    """

    norm: float
    median_row: float
    largest_row: float
    columns: int
    squares: Squares
    """Sums of squares [rows]."""

    @property
    def rows(self) -> Floats:
        sizes: Floats = np.sqrt(self.squares.astype(np.float64) / max(1, self.columns))
        return sizes


def measured(values: NDArray[np.float32]) -> Measured:
    """How large ``values`` [rows, columns] are.

    Squares are summed in float32, which holds those of a million values as large as may be
    accepted; where rows are long, in float64, which keeps the small ones.
    """
    return measured_each(values, [len(values)])[0]


def measured_each(values: NDArray[np.float32], counts: Sequence[int]) -> list[Measured]:
    """As :func:`measured` has them, updates of as many columns whose ``values`` are one behind the
    other; ``counts`` of their rows. What is found of one is the same bits beside any others."""
    columns = values.shape[1]
    if columns <= _SHORT:
        squares: Squares = np.einsum("ij,ij->i", values, values)
    else:
        squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
    ends = list(accumulate(counts))
    ordered = squares.copy()
    for count, end in zip(counts, ends, strict=True):
        ordered[end - count : end].sort()
    # Every update passes here: numpy is called for those that have rows together.
    some = [(count, end) for count, end in zip(counts, ends, strict=True) if count]
    width = max(1, columns)
    sizes: Iterator[tuple[float, float, float]] = iter(())
    if some:
        norms = np.sqrt(
            np.add.reduceat(squares.astype(np.float64), [end - count for count, end in some])
        )
        middle = ordered[[end - count + (count - 1) // 2 for count, end in some]]
        last = ordered[[end - 1 for _, end in some]]
        medians, largest = (np.sqrt(each.astype(np.float64) / width) for each in (middle, last))
        sizes = zip(norms.tolist(), medians.tolist(), largest.tolist(), strict=True)
    return [
        Measured(*(next(sizes) if count else _NO_SIZES), columns, squares[end - count : end])
        for count, end in zip(counts, ends, strict=True)
    ]


_NO_SIZES = (0.0, 0.0, 0.0)


def bounded_rows(
    values: NDArray[np.float32], sizes: Floats, limit: float | Floats
) -> tuple[NDArray[np.float32], int]:
    """``values`` [rows, columns] with rows above ``limit`` scaled down to it, and how many were.

    ``sizes`` are the rows', as :class:`Measured` has them or by another measure, [rows]; ``limit``
    is one for all rows or one for each.
    """
    large = sizes > limit
    count = int(np.count_nonzero(large))
    if not count:
        return values, 0
    scale = np.ones(len(sizes), dtype=np.float32)
    scale[large] = (np.broadcast_to(limit, sizes.shape)[large] / sizes[large]).astype(np.float32)
    return values * scale[:, None], count


# What is usual in a fleet: medians over a few devices, each of which has one voice.

LEAST_VOICES = 3
"""Voices of which one that lies cannot choose the median."""
MOST_VOICES = 256
_NAME_BYTES = 16

Voice = tuple[float, ...]


class Voices(Additive):
    """A few measures of an update, of 256 devices heard of lately.

    Of a round's devices those 256 have a voice whose ids, hashed with the round's number, come
    first: whatever the order, and on however many shards they are heard. Where a round has fewer,
    the voices of earlier rounds stay beside its own, the latest first. The aggregator draws the
    ids, so nobody chooses to be among the first, and each round's are others.

    Args:
        measures: how many numbers an update is described by.

    Of two updates of one device in a round the larger counts. Those without a sender are named by
    what they say. A round that is given up leaves no trace: the next absorbs its updates again.
    """

    FRESH = True

    def __init__(self, measures: int) -> None:
        self._measures = measures
        self._settled: dict[bytes, Voice] = {}  # the latest first
        self.begin(0)

    def begin(self, round_id: int) -> None:
        """A round begins; forget what came since the last one that settled."""
        self._round = round_id
        self._salt = round_id.to_bytes(8, "little")
        self._order: list[tuple[bytes, bytes]] = []  # rising: each voice's place, and its name
        self._recent: dict[bytes, Voice] = {}

    @property
    def settled(self) -> Mapping[bytes, Voice]:
        """What was known when the round opened, by the voices' names."""
        return self._settled

    @property
    def together(self) -> dict[bytes, Voice]:
        """This round's voices first, in the order of their places, then earlier ones."""
        found = {name: self._recent[name] for _, name in self._order}
        for name, values in self._settled.items():
            if len(found) == MOST_VOICES:
                break
            found.setdefault(name, values)
        return found

    def note(self, sender: str, values: Sequence[float]) -> None:
        """Take note of an accepted update: finite values, one a measure, none below 0."""
        self._hear(bytes.fromhex(sender) if sender else _nameless(values), tuple(values))

    def settle(self) -> None:
        self._settled = self.together
        self.begin(self._round)

    def _hear(self, name: bytes, values: Voice) -> None:
        recent, order = self._recent, self._order
        if name in recent:
            recent[name] = max(recent[name], values)
            return
        place = blake2b(name + self._salt, digest_size=8).digest(), name
        if len(order) == MOST_VOICES and place > order[-1]:
            return
        insort(order, place)
        recent[name] = values
        if len(order) > MOST_VOICES:
            del recent[order.pop()[1]]

    def state(self) -> dict[str, NDArray[Any]]:
        """``settled.names`` uint8 [voices, 16] and ``settled.values`` float64 [voices, measures],
        the latest first; of the open round likewise ``recent.*``, and its number, ``round``."""
        settled = prefixed("settled.", _packed(self._settled, self._measures))
        return settled | prefixed("recent.", self._recent_state()) | self._round_state()

    def share(self) -> dict[str, NDArray[Any]]:
        """``names`` and ``values`` of the round's voices, and ``round``."""
        return self._recent_state() | self._round_state()

    def _recent_state(self) -> dict[str, NDArray[Any]]:
        return _packed({name: self._recent[name] for _, name in self._order}, self._measures)

    def _round_state(self) -> dict[str, NDArray[Any]]:
        return {"round": np.asarray(self._round, dtype=np.int64)}

    def restored(self, state: State) -> Self:
        """See :class:`~device_sdk.methods.state.Stateful`."""
        found = type(self)(self._measures)
        if not state:
            return found
        own = {n: a for n, a in state.items() if "." not in n}
        found._settled = _unpacked(part("settled.", state), self._measures)
        found.begin(int(unpack({"round": COUNT}, own)["round"]))
        for name, values in _unpacked(part("recent.", state), self._measures).items():
            found._hear(name, values)
        return found

    def _read(self, share: State) -> dict[str, Any]:
        own = dict(share)
        number = unpack({"round": COUNT}, {n: own.pop(n) for n in ("round",) if n in own})["round"]
        if number > self._round:
            raise RefusedShare(f"the share is of round {number}, and this one is {self._round}")
        return {"voices": _unpacked(own, self._measures)}

    def _add(self, found: Mapping[str, Any]) -> None:
        for name, values in found["voices"].items():
            self._hear(name, values)


def _nameless(values: Sequence[float]) -> bytes:
    packed = struct.pack(f"<{len(values)}d", *values)
    return blake2b(packed, digest_size=_NAME_BYTES).digest()


def _packed(voices: Mapping[bytes, Voice], measures: int) -> dict[str, NDArray[Any]]:
    names = np.frombuffer(b"".join(voices), dtype=np.uint8).reshape(len(voices), _NAME_BYTES)
    values = np.asarray(list(voices.values()), dtype=np.float64).reshape(len(voices), measures)
    return {"names": names.copy(), "values": values}


def _unpacked(state: State, measures: int) -> dict[bytes, Voice]:
    schema = {
        "names": Entry(np.uint8, ("voices", _NAME_BYTES)),
        "values": Entry(np.float64, ("voices", measures), least=0),
    }
    found = unpack(schema, state)
    names = [name.tobytes() for name in found["names"]]
    if len(set(names)) < len(names) or len(names) > MOST_VOICES:
        raise RestoreError(f"'names' are expected to be at most {MOST_VOICES}, and to differ")
    return dict(zip(names, map(tuple, found["values"].tolist()), strict=True))


class FleetScale(Voices):
    """Medians of a few measures of an update, over the fleet's :class:`Voices`.

    They stay as they are for a whole round, that of its opening. Values are noted as they came,
    before anything was scaled down.
    """

    @property
    def known(self) -> bool:
        """Whether there are voices enough for a median that no single device chooses."""
        return self._count >= LEAST_VOICES

    def median(self, measure: int) -> float:
        """Of one measure, the lower of two in the middle; 0 where nothing is known."""
        return self._medians[measure]

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._judge_by(self._settled)

    def look_again(self) -> None:
        self._judge_by(self.together)

    def _judge_by(self, voices: Mapping[bytes, Voice]) -> None:
        self._count = len(voices)
        measures = zip(*voices.values(), strict=True)
        columns: list[list[float]] = [sorted(column) for column in measures]
        middle = (self._count - 1) // 2
        self._medians = [column[middle] for column in columns] or [0.0] * self._measures


_MOST_SCALES = 4096
"""As many as an update may have arrays."""


class FleetScales(Additive):
    """For each name that updates have, how large and how far from what was told it usually is."""

    def __init__(self) -> None:
        self._by_name: dict[str, FleetScale] = {}
        self._round = 0

    def medians(self, name: str) -> tuple[float, float] | None:
        """Of both measures; None where no majority speaks of the name."""
        scale = self._by_name.get(name)
        return (scale.median(0), scale.median(1)) if scale is not None and scale.known else None

    def note(self, name: str, sender: str, sizes: tuple[float, float]) -> None:
        """Take note of an update's; what is zero says nothing of what is usual."""
        if max(sizes) > 0:
            if name not in self._by_name:
                self._by_name[name] = self._new()
            self._by_name[name].note(sender, sizes)

    def _new(self) -> FleetScale:
        scale = FleetScale(2)
        scale.begin(self._round)
        return scale

    def begin(self, round_id: int) -> None:
        self._round = round_id
        for scale in self._by_name.values():
            scale.begin(round_id)

    def look_again(self) -> None:
        for scale in self._by_name.values():
            scale.look_again()

    def settle(self) -> None:
        for scale in self._by_name.values():
            scale.settle()
        if len(self._by_name) > _MOST_SCALES:
            # Names that one device made up. Those that a majority uses are known.
            self._by_name = {name: each for name, each in self._by_name.items() if each.known}

    def state(self) -> dict[str, NDArray[Any]]:
        """``round``, and of each name ``NAME|ARRAY``; copies."""
        found = {"round": np.asarray(self._round, dtype=np.int64)}
        for name, scale in self._by_name.items():
            found.update(prefixed(f"{name}|", scale.state()))
        return found

    def restored(self, state: State) -> FleetScales:
        """See :class:`~device_sdk.methods.state.Stateful`."""
        found = FleetScales()
        own = {name: array for name, array in state.items() if "|" not in name}
        found._round = int(unpack({"round": COUNT}, own)["round"])
        for name, each in _by_name(state).items():
            found._by_name[name] = FleetScale(2).restored(each)
        return found

    def share(self) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for name, scale in self._by_name.items():
            found.update(prefixed(f"{name}|", scale.share()))
        return found

    def _read(self, share: State) -> dict[str, Any]:
        unpack({}, {name: array for name, array in share.items() if "|" not in name})
        new, each = self._new(), _by_name(share).items()
        return {name: self._by_name.get(name, new)._read(own) for name, own in each}

    def _add(self, found: Mapping[str, Any]) -> None:
        for name, voices in found.items():
            self._by_name.setdefault(name, self._new())._add(voices)


def _by_name(state: State) -> dict[str, dict[str, NDArray[Any]]]:
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in state.items():
        name, bar, rest = key.rpartition("|")
        if bar:
            found.setdefault(name, {})[rest] = array
    return found


# Which updates are out of line with the fleet's: far too large, or far too lopsided.
#
# A limit bounds what a hostile device adds; an update that no honest device would send need not
# be bounded, it can be left out. The measures are an update's own, so that updates are judged
# one by one, as they come, and the scale is the fleet's median, which a minority does not
# choose.

_LEAST_ALIKE = 32
"""Voices of a class among the 256 that make it a class of its own. Whoever wants to be the majority
of such a class needs a sixteenth of the fleet."""
_MOST_APART = 16.0
"""How much larger than the fleet's the median of the class ahead may be taken to be. While a model
takes off, devices of all columns are ahead of the others by a factor of ten."""


class Outliers(Additive):
    """Tells updates apart by their size and their peak, each against the fleet's median.

    The *size* of an update [rows, columns] is the root mean square of its values. Devices that
    train more columns run ahead while a model takes off, and the others follow in a single round.
    So all are compared with the class that is ahead: updates of as many columns, to a power of two,
    of which there are at least 32 among the 256 voices. How many columns an update has is its
    sender's own claim: a class of its own would bound nobody who knows of it. The *peak* is the
    size of the largest row over the mean size of the rows: from 1 to the number of rows, whatever
    the update is multiplied by.

    Args:
        multiple: an update is an outlier with a size or a peak of more than so many medians.

    Both are noted for every update, outliers too. Medians stay as they were when the round opened;
    a round that is given up leaves no trace.
    """

    PARTS = ("voices",)
    ADDED = ("count",)
    FRESH = True
    _count: int

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._voices = Voices(3)
        self.begin(0)

    @property
    def known(self) -> bool:
        """Whether there are voices enough to tell updates apart."""
        return self._known >= LEAST_VOICES

    @property
    def count(self) -> int:
        """Of this round."""
        return self._count

    def note(self, sender: str, found: Measured) -> None:
        """Take note of an accepted update; not of one without rows, or of zeros."""
        if (seen := _seen(found)) is not None:
            self._voices.note(sender, seen)

    def holds(self, found: Measured) -> bool:
        """Whether the update is an outlier, which is counted; one without rows, or of zeros, is
        none. While the fleet is not known, none is."""
        seen = _seen(found)
        if seen is None or not self.known:
            return False
        size, peak, _ = seen
        outlier = size > self._multiple * self._usual_size
        outlier = outlier or peak > self._multiple * self._usual_peak
        self._count += outlier
        return outlier

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._judge_by(self._voices.settled)

    def look_again(self) -> None:
        self._judge_by(self._voices.together)

    def _judge_by(self, voices: Mapping[bytes, Voice]) -> None:
        self._known = len(voices)
        seen = np.asarray(list(voices.values()), dtype=np.float64).reshape(-1, 3)
        sizes, _, widths = seen.T
        usual, peak = np.median(seen[:, :2], axis=0) if len(seen) else np.zeros(2)
        classes = [sizes[widths == width] for width in set(widths.tolist())]
        ahead = [float(np.median(alike)) for alike in classes if len(alike) >= _LEAST_ALIKE]
        self._usual_size = min(max([float(usual), *ahead]), _MOST_APART * float(usual))
        self._usual_peak = float(peak)

    def _require_sound(self) -> None:
        self._judge_by(self._voices.settled)


def _seen(found: Measured) -> Voice | None:
    """An update's size, peak and class; None without rows, or of zeros."""
    if not found.largest_row:
        return None
    rows = found.rows
    size = found.norm / math.sqrt(len(rows) * found.columns)
    return size, found.largest_row / float(rows.mean()), float(found.columns.bit_length())
