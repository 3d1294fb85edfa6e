"""Bounds how far a single device can move the model."""

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
from device_sdk.methods.state import (
    COUNT,
    Entry,
    RestoreError,
    Schema,
    State,
    part,
    prefixed,
    unpack,
)

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


# What is done to every update before it counts: outliers are left out, rows and norms are held
# within limits.

_FIRST_LENGTHS = 10.0
"""Lengths of the first model that an update may have while the fleet's norms are unknown: more
than a round of honest training moves a model, far too little to carry it out of a codec's range."""
MOST_MEDIANS = 1024.0
"""Of the fleet's, where no limit of norms holds: a sum of integers has to end somewhere."""
_NORM, _ROW, _OTHERS = 0, 1, 2
_LENGTHS = 1
"""Of the other measures, those that are lengths and come first."""

Floats32 = NDArray[np.float32]


class UpdateLimits(Additive):
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

    Updates are judged by what was known when their round opened, so that their order within it
    says nothing. Where all of a round's are held until it closes, as they are while :attr:`known`
    is false, all are noted first, then :meth:`look_again`, and judged by each other.

    Args:
        clip_norm: the largest Euclidean norm; 0 for no limit.
        clip_multiple: likewise, as a multiple of the fleet's median norm; see
            :class:`~aggregator.methods.limits.FleetScale`.
        row_multiple: the largest size of a row, as a multiple of the median of updates' median
            rows; for updates of two dimensions. Sizes are root mean squares, so a device that
            trains few columns is measured as one that trains many.
        outlier_multiple: an update of two dimensions that is out of line by more than this is left
            out; see :class:`~aggregator.methods.limits.Outliers`.
        length: of the first model, Euclidean. Until three devices' norms are known, an update of a
            limit that follows may be ten times as long.
        others: further measures; see :meth:`most_length` and :meth:`usual`.

    Each is off at 0. Memory is that of a thousand numbers.
    """

    PARTS = ("fleet", "outliers")
    ADDED = ("bounded",)

    def __init__(
        self,
        clip_norm: float,
        clip_multiple: float = 0.0,
        row_multiple: float = 0.0,
        outlier_multiple: float = 0.0,
        *,
        length: float,
        others: int = 0,
    ) -> None:
        self._clip_norm = clip_norm
        self._clip_multiple = clip_multiple
        self._row_multiple = row_multiple
        self._length = length
        self._fleet = FleetScale(_OTHERS + others)
        self._outliers = Outliers(outlier_multiple) if outlier_multiple else None
        self._bounded = 0

    @property
    def known(self) -> bool:
        """Whether an update can be judged by the fleet."""
        return self._fleet.known and (self._outliers is None or self._outliers.known)

    def note(self, sender: str, found: Measured, others: Sequence[float] = ()) -> None:
        """Take note of an accepted update as it came; one without any length says nothing of what
        is usual."""
        if found.norm > 0 or any(others[:_LENGTHS]):
            self._fleet.note(sender, (found.norm, found.median_row, *others))
        if self._outliers is not None:
            self._outliers.note(sender, found)

    def apply(
        self, values: Floats32, found: Measured, weight: float = 1.0
    ) -> tuple[Floats32, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm; 0 where it is an outlier. For an update that was
        :func:`measured` as ``found``, once. One that weighs more than usual, ``weight`` times, may
        be that much less long."""
        if self._outliers is not None and self._outliers.holds(found):
            return values, 0.0
        if not values.size:
            return values, 1.0
        if self._row_multiple and self._fleet.known:
            most = self._row_multiple * self._fleet.median(_ROW)
            if 0 < most < found.largest_row:
                values, count = bounded_rows(values, found.rows, most)
                self._bounded += count
                found = measured(values)
        limit = self._clip_norm or math.inf
        if self._clip_multiple:
            following = self._following(_NORM, self._clip_multiple, self._length)
            limit = min(limit, following / max(1.0, weight))
        return values, 1.0 if found.norm <= limit else limit / found.norm

    def most_pull(self, usual: float = 1.0, heaviest: float = 1.0) -> float:
        """The largest norm times weight that :meth:`apply` leaves an update, where ``usual`` is the
        usual weight and none is above ``heaviest``; infinite without a limit of norms."""
        most = self._clip_norm * heaviest or math.inf
        if self._clip_multiple:
            following = self._following(_NORM, self._clip_multiple, self._length)
            most = min(most, following * (usual or heaviest))
        return most

    @property
    def absurd_norm(self) -> float:
        """1,024 times the fleet's median norm or, where that is 0, the first model's length."""
        return MOST_MEDIANS * (self._fleet.median(_NORM) or max(self._length, 1.0))

    @property
    def multiple(self) -> float:
        """Of the fleet's medians that limits of lengths follow; 0 for none."""
        return self._clip_multiple

    def most_length(self, place: int, length: float) -> float:
        """The largest that another measure, a length, may be: ``clip_multiple`` times the fleet's
        median or, while that is unknown, ten times ``length``; infinite without the limit."""
        if not self._clip_multiple:
            return math.inf
        return self._following(_OTHERS + place, self._clip_multiple, length)

    def absurd_length(self, place: int, length: float) -> float:
        """As :attr:`absurd_norm`, of another measure."""
        return MOST_MEDIANS * (self._fleet.median(_OTHERS + place) or max(length, 1.0))

    def usual(self, place: int) -> float:
        """The median of another measure, over however few devices; 0 where nothing is known."""
        return self._fleet.median(_OTHERS + place)

    def metrics(self) -> dict[str, float]:
        """Of this round: ``bounded_rows`` that were scaled down, and ``outliers``, in so far as
        these limits are in use."""
        found: dict[str, float] = {}
        if self._row_multiple:
            found["bounded_rows"] = float(self._bounded)
        if self._outliers is not None:
            found["outliers"] = float(self._outliers.count)
        return found

    def _schema(self) -> Schema:
        return {**super()._schema(), "length": Entry(np.float64, least=0)}

    def _following(self, measure: int, multiple: float, length: float) -> float:
        median = self._fleet.median(measure) if self._fleet.known else 0.0
        # Where most devices send zeros, or too few are known, there is no scale but the model's.
        return multiple * median if median else _FIRST_LENGTHS * max(length, 1.0)
