"""Bounds how far a single device can move the model."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import COUNT, Entry, RestoreError, Schema, State, Stateful, unpack

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
    rows, columns = values.shape
    if columns <= _SHORT:
        squares: Squares = np.einsum("ij,ij->i", values, values)
    else:
        squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
    # Every update passes here: as few calls of numpy as will do, and none of its wrappers.
    norm = math.sqrt(np.add.reduce(squares, dtype=np.float64))
    if not rows:
        return Measured(norm, 0.0, 0.0, columns, squares)
    ordered = squares.copy()
    ordered.sort()
    width = max(1, columns)
    median = math.sqrt(ordered.item((rows - 1) // 2) / width)
    return Measured(norm, median, math.sqrt(ordered.item(-1) / width), columns, squares)


def row_sizes(values: NDArray[Any]) -> Floats:
    """Root mean square of each row, float64 [rows]: comparable whatever the number of columns."""
    wide = values.astype(np.float64)
    sizes: Floats = np.sqrt(np.einsum("ij,ij->i", wide, wide) / max(1, values.shape[1]))
    return sizes


def bounded_rows(
    values: NDArray[np.float32], sizes: Floats, limit: float | Floats
) -> tuple[NDArray[np.float32], int]:
    """``values`` [rows, columns] with rows above ``limit`` scaled down to it, and how many were.

    ``sizes`` are the rows', as :func:`row_sizes` has them or by another measure, [rows]; ``limit``
    is one for all rows or one for each.
    """
    large = sizes > limit
    count = int(np.count_nonzero(large))
    if not count:
        return values, 0
    scale = np.ones(len(sizes), dtype=np.float32)
    scale[large] = (np.broadcast_to(limit, sizes.shape)[large] / sizes[large]).astype(np.float32)
    return values * scale[:, None], count


# Which updates are out of line with the fleet's: far too large, or far too lopsided.
#
# A limit bounds what a hostile device adds; an update that no honest device would send need not
# be bounded, it can be left out. The measures are an update's own, so that updates are judged
# one by one, as they come, and the scale is the running median, which a minority does not
# choose.

_WINDOW = 256
"""Updates that the running medians are taken over."""
_LEAST_ALIKE = 32
"""Updates of a class within the window that make it a class of its own. Whoever wants to be the
majority of such a class needs a sixteenth of all updates."""
_MOST_APART = 16.0
"""How much larger than the fleet's a class's median may be taken to be. While a model takes off,
devices of all columns are ahead of the others by a factor of ten."""


class Outliers(Stateful):
    """Tells updates apart by their size and their peak, each against its running median.

    The *size* of an update [rows, columns] is the root mean square of its values. Devices that
    train more columns run ahead while a model takes off, so it is compared with the updates of as
    many columns, to a power of two, where the last 256 updates hold at least 32 of them. The *peak*
    is the size of the largest row over the mean size of the rows: from 1 to the number of rows,
    whatever the update is multiplied by.

    Args:
        multiple: an update is an outlier with a size or a peak of more than so many medians.

    Both are noted for every update, outliers too, in the order of the commits. A round that is
    given up leaves no trace, as with :class:`~aggregator.methods.limits.AdaptiveLimit`.
    """

    FRESH = True

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._settled: Floats = np.empty((0, 3), dtype=np.float64)
        self._recent: Floats = self._settled
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def holds(self, values: NDArray[np.float32]) -> bool:
        """Take note of an accepted update, [rows, columns]; whether it is an outlier.

        An update without rows, or of zeros, is none and is not noted.
        """
        if not values.size:
            return False
        sizes = row_sizes(values)
        mean = float(sizes.mean())
        if mean == 0:
            return False
        size, peak = float(np.sqrt(np.square(sizes).mean())), float(sizes.max()) / mean
        width = values.shape[1].bit_length()
        self._recent = np.vstack([self._recent[-(_WINDOW - 1) :], (size, peak, width)])
        usual = np.median(self._recent[:, :2], axis=0)
        alike = self._recent[self._recent[:, 2] == width, 0]
        if len(alike) >= _LEAST_ALIKE:
            usual[0] = min(float(np.median(alike)), _MOST_APART * usual[0])
        found = bool(size > self._multiple * usual[0] or peak > self._multiple * usual[1])
        self._count += found
        return found

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._recent = self._settled
        self._count = 0

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled = self._recent

    def _schema(self) -> Schema:
        noted = Entry(np.float64, ("updates", 3), least=0)
        # Each has a number of updates of its own.
        return {"settled": noted, "recent": replace(noted, shape=("noted", 3)), "count": COUNT}

    def _require_sound(self) -> None:
        if max(len(self._settled), len(self._recent)) > _WINDOW:
            raise RestoreError(f"'settled' and 'recent' are expected to hold at most {_WINDOW}")


# What is usual in a fleet: running medians in which every device has one voice.

LEAST_VOICES = 3
"""Voices of which one that lies cannot choose the median."""
_SENDER_BYTES = 16


class _Voices(Stateful):
    """What was noted of each device that was heard of lately, the oldest first: where it stands
    among the ``count`` updates, and its values. Updates without a sender are named by their place.
    """

    def __init__(self, measures: int) -> None:
        self.measures = measures
        self.noted: dict[str, tuple[int, tuple[float, ...]]] = {}
        self.count = 0

    def copy(self) -> _Voices:
        found = copy.copy(self)
        found.noted = dict(self.noted)
        return found

    def state(self) -> dict[str, NDArray[Any]]:
        named = np.asarray([len(name) == 2 * _SENDER_BYTES for name in self.noted], dtype=np.bool_)
        senders = np.zeros((len(named), _SENDER_BYTES), dtype=np.uint8)
        for row, name in enumerate(self.noted):
            if named[row]:
                senders[row] = np.frombuffer(bytes.fromhex(name), dtype=np.uint8)
        values = np.asarray([values for _, values in self.noted.values()], dtype=np.float64)
        return {
            "named": named,
            "senders": senders,
            "places": np.asarray([place for place, _ in self.noted.values()], dtype=np.int64),
            "values": values.reshape(len(named), self.measures),
            "count": np.asarray(self.count, dtype=np.int64),
        }

    def restored(self, state: State) -> _Voices:
        schema = {
            "named": Entry(np.bool_, ("voices",)),
            "senders": Entry(np.uint8, ("voices", _SENDER_BYTES)),
            "places": Entry(np.int64, ("voices",)),
            "values": Entry(np.float64, ("voices", self.measures), least=0),
            "count": COUNT,
        }
        own = unpack(schema, state)
        found = _Voices(self.measures)
        found.count = count = int(own["count"])
        places = own["places"]
        if (np.diff(places) <= 0).any() or not (
            (places > max(0, count - _WINDOW)) & (places <= count)
        ).all():
            raise RestoreError(f"'places' are expected to rise within the last {_WINDOW} updates")
        columns = (own["named"].tolist(), own["senders"], places.tolist(), own["values"].tolist())
        for has, sender, place, row in zip(*columns, strict=True):
            found.noted[sender.tobytes().hex() if has else str(place)] = (place, tuple(row))
        if len(found.noted) != len(places):
            raise RestoreError("a device has two of the 'senders'")
        return found


class FleetScale(Stateful):
    """Medians of a few measures of an update, over the devices heard of in the last 256 updates.

    Of each device its latest update counts: one that takes part in every round, while others come
    now and then, is no more than one voice. Updates without a sender are voices of their own.

    Args:
        measures: how many numbers an update is described by.

    Values are noted as they came, before anything was scaled down, in the order of the commits, so
    the same updates in the same order give the same medians. A round that is given up leaves no
    trace: its updates are absorbed again by the next.
    """

    PARTS = ("settled", "recent")
    FRESH = True

    def __init__(self, measures: int) -> None:
        self._settled = _Voices(measures)
        self.begin()

    @property
    def known(self) -> bool:
        """Whether there are voices enough for a median that no single device chooses."""
        return len(self._recent.noted) >= LEAST_VOICES

    def note(self, sender: str, values: Sequence[float]) -> None:
        """Take note of an accepted update: finite values, one a measure, none below 0."""
        recent = self._recent
        noted = recent.noted
        recent.count = place = recent.count + 1
        name = sender or str(place)
        if name in noted:
            self._drop(name)
        noted[name] = (place, tuple(values))
        for ordered, value in zip(self._ordered, values, strict=True):
            insort(ordered, value)
        for oldest, (when, _) in noted.items():
            if when <= place - _WINDOW:
                self._drop(oldest)  # at most one a call: all of the last so many are here
            return

    def median(self, measure: int) -> float:
        """Of one measure, the lower of two in the middle; 0 where nothing is known."""
        ordered = self._ordered[measure]
        return ordered[(len(ordered) - 1) // 2] if ordered else 0.0

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._recent = self._settled.copy()
        self._require_sound()

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled = self._recent.copy()

    def _require_sound(self) -> None:
        noted = [values for _, values in self._recent.noted.values()]
        self._ordered = [
            sorted(values[measure] for values in noted) for measure in range(self._recent.measures)
        ]

    def _drop(self, name: str) -> None:
        for ordered, value in zip(self._ordered, self._recent.noted.pop(name)[1], strict=True):
            del ordered[bisect_left(ordered, value)]


# What is done to every update before it counts: outliers are left out, rows and norms are held
# within limits.

_FIRST_LENGTHS = 10.0
"""Lengths of the first model that an update may have while the fleet's norms are unknown: more
than a round of honest training moves a model, far too little to carry it out of a codec's range."""
_NORM, _ROW, _OTHERS = 0, 1, 2
_LENGTHS = 1
"""Of the other measures, those that are lengths and come first."""

Floats32 = NDArray[np.float32]


class UpdateLimits(Stateful):
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

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
        self._outlier_multiple = outlier_multiple
        self._length = length
        self._others = others
        self._follows = bool(clip_multiple or row_multiple or others)
        self._parts_follow()
        self._bounded = 0

    @property
    def known(self) -> bool:
        """Whether an update can be judged by the fleet: always, where no limit follows it."""
        return self._fleet is None or self._fleet.known

    def note(self, sender: str, found: Measured, others: Sequence[float] = ()) -> None:
        """Take note of an accepted update as it came, once, in commit order; one without any length
        says nothing of what is usual."""
        if self._fleet is not None and (found.norm > 0 or any(others[:_LENGTHS])):
            row = found.median_row if self._row_multiple else 0.0
            self._fleet.note(sender, (found.norm, row, *others))

    def apply(
        self, values: Floats32, found: Measured, weight: float = 1.0
    ) -> tuple[Floats32, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm; 0 where it is an outlier. For an update that was
        noted, once, in commit order, with what was :func:`measured` of it. One that weighs more
        than usual, ``weight`` times, may be that much less long."""
        if self._outliers is not None and self._outliers.holds(values):
            return values, 0.0
        if not values.size:
            return values, 1.0
        if self._row_multiple and self._fleet is not None and self._fleet.known:
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

    def most_length(self, place: int, length: float) -> float:
        """The largest that another measure, a length, may be: ``clip_multiple`` times the fleet's
        median or, while that is unknown, ten times ``length``; infinite without the limit."""
        if not self._clip_multiple:
            return math.inf
        return self._following(_OTHERS + place, self._clip_multiple, length)

    def usual(self, place: int) -> float:
        """The median of another measure, over however few devices; 0 where nothing is known."""
        return 0.0 if self._fleet is None else self._fleet.median(_OTHERS + place)

    def metrics(self) -> dict[str, float]:
        """Of this round: ``bounded_rows`` that were scaled down, and ``outliers``, in so far as
        these limits are in use."""
        found: dict[str, float] = {}
        if self._row_multiple:
            found["bounded_rows"] = float(self._bounded)
        if self._outliers is not None:
            found["outliers"] = float(self._outliers.count)
        return found

    def begin(self) -> None:
        """A round begins; what was noted in one that made no version is forgotten."""
        self._bounded = 0
        for one in (self._fleet, self._outliers):
            if one is not None:
                one.begin()

    def settle(self) -> None:
        """The round made a version."""
        for one in (self._fleet, self._outliers):
            if one is not None:
                one.settle()

    def _schema(self) -> Schema:
        # What the state does not know starts afresh.
        length = {"length": Entry(np.float64, least=0, optional=True)} if self._fleet else {}
        bounded = {"bounded": replace(COUNT, optional=True)} if self._row_multiple else {}
        return length | bounded

    def _parts_follow(self) -> None:
        self._fleet = FleetScale(_OTHERS + self._others) if self._follows else None
        self._outliers = Outliers(self._outlier_multiple) if self._outlier_multiple else None

    def restored(self, state: State) -> UpdateLimits:
        """Limits with these settings that continue from ``state()``; this object is unchanged.

        A limit that the state does not know starts afresh, and what is no longer in use is dropped:
        the options may change between rounds. Raises RestoreError for arrays that do not fit.
        """
        used = {*self._schema(), *self.PARTS}
        return super().restored({n: a for n, a in state.items() if n.split(".")[0] in used})

    def _following(self, measure: int, multiple: float, length: float) -> float:
        assert self._fleet is not None
        median = self._fleet.median(measure) if self._fleet.known else 0.0
        # Where most devices send zeros, or too few are known, there is no scale but the model's.
        return multiple * median if median else _FIRST_LENGTHS * max(length, 1.0)
