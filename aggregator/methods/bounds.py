"""What one sender's update may do, whatever the method: the stage between ``check`` and ``absorb``.

A method is its formula. What its updates hold is measured here, against what is usual in the fleet,
and held to a multiple of that before the method sees it: tensors by their distance from what the
round told the devices (or from zero, whichever the fleet is nearer to), numbers of samples and the
like by their size. So one device of n moves a mean by at most ``multiple`` usual contributions out
of n, whatever it sends and claims, and no other device is handed more of it than that.

One stage (:class:`Bounding`), two policies: :class:`UpdateBounds` for tensors of any kind, one by
one, and :class:`Limits` for an update that is one matrix, whose sums take their scale from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.fleet import (
    FleetScale,
    FleetScales,
    Measured,
    Outliers,
    bounded_rows,
    measured,
)
from aggregator.methods.sums import Additive
from device_sdk.methods.state import COUNT, Entry, Schema, State, part, prefixed
from device_sdk.wire.arrays.exchange import Scalar, Update

Array = NDArray[Any]
Floats = NDArray[np.float32]

_FIRST_LENGTHS = 10.0
"""Lengths of what was told, or of the first model, that an update may have while nothing is known
of the fleet: more than a round of honest training moves a model, far too little to carry it out of
a codec's range."""

# The stage that every method gets.

_NOTHING: Mapping[str, Array] = MappingProxyType({})
_NO_VALUES: Floats = np.empty((0, 0), dtype=np.float32)


class Sized(NamedTuple):
    """An update as it came, decoded.

    Attributes:
        expected: what the device was told of its tensors; see
            :meth:`~aggregator.methods.method.Method.expected`.
        values: of an update that is one matrix, float32 [rows, columns].
        found: how large they are.
        others: what limits take note of beside, lengths first.
        weight: how many times the usual it weighs: it may be that much less long.
        factor: what one within the limits of its norm has to be multiplied by, at most 1.
    """

    update: Update
    expected: Mapping[str, Array] = _NOTHING
    values: Floats = _NO_VALUES
    found: Measured = Measured(0.0, 0.0, 0.0, 0, np.empty(0, dtype=np.float32))
    others: tuple[float, ...] = ()
    weight: float = 1.0
    factor: float = 1.0


class Judged(NamedTuple):
    """An update as it counts: ``values`` are multiplied by ``factor``, 0 to 1, already. Of 0, an
    outlier, no row is left."""

    update: Update
    values: Floats = _NO_VALUES
    others: tuple[float, ...] = ()
    factor: float = 1.0


class Bounding(Additive):
    """The stage by itself, which bounds nothing: for methods whose form is bound enough.

    Each update is judged by what was known when its round opened, so that the order within it says
    nothing. Where all of a round's are held until it closes, as they are while :attr:`holds`, all
    are noted first, then :meth:`look_again`, and judged by each other.

    Attributes:
        lowered: whose claims counted for less than they said, and how: for people, who clear it. No
            part of the state.
    """

    ADDED: ClassVar[tuple[str, ...]] = ("clipped", "fewer")
    _clipped = 0
    _fewer = 0

    def __init__(self) -> None:
        self.lowered: dict[str, str] = {}

    @property
    def holds(self) -> bool:
        """Whether the open round's updates are held until it closes, for too little is known."""
        return False

    @property
    def told(self) -> Mapping[str, Array]:
        """What of the open round's broadcast updates are compared with."""
        return _NOTHING

    def tell(self, tensors: Mapping[str, Array]) -> None:
        """The round opened with a broadcast of these tensors."""

    def note(self, one: Sized) -> None:
        """Take note of an accepted update as it came."""

    def judged(self, one: Sized) -> Judged:
        """The update as it counts. One that is within all bounds comes back as it is."""
        return Judged(one.update)

    def lower(self, sender: str, how: str) -> None:
        """A claim of this update counts for less than it says."""
        self._fewer += 1
        self.lowered[sender] = how

    def metrics(self) -> dict[str, float]:
        """``clipped`` updates of the round, which were brought within bounds, and
        ``fewer_samples``, whose claims count for less; where there are any."""
        acted = {"clipped": self._clipped, "fewer_samples": self._fewer}
        return {name: float(count) for name, count in acted.items() if count}


# By tensors: of any method.

_Sizes = dict[str, tuple[float, float]]

_HELD_VERSIONS = 2
"""So many versions' rounds are held until they close. In the first nothing is known of the fleet;
what the devices are told they may differ from by themselves only from the second on."""


@dataclass(frozen=True, slots=True)
class UpdateBounds:
    """How a method's updates are bounded. The defaults suit any that does not say otherwise.

    Attributes:
        multiple: of what is usual.
        rows: tensors of values of which each row is bounded by itself: vectors of single labels,
            say.
        values: integer tensors that are numbers like any float ones, and bounded as these are.
        counts: integer tensors that claim how many samples there are. Integers without an axis do
            in any case, as tensors and as metadata. Others are taken for places, be it a single
            one, and left alone: nothing in them tells a far place from a large number.
        exact: tensors and metadata that are left as they are: numbers of a kind, or what its form
            bounds.
    """

    multiple: float = 3.0
    rows: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()


class TensorBounding(Bounding):
    """Measures and bounds a task's updates, each judged by what was known when its round opened.

    The rounds of a task's first two versions are held until they close, and judged by themselves,
    so that who comes first chooses nothing. While fewer than three devices were heard of there is
    no majority, and nothing is bounded.
    """

    PARTS = ("heard", "scales")

    def __init__(self, bounds: UpdateBounds) -> None:
        super().__init__()
        self._bounds = bounds
        self._scales, self._heard = FleetScales(), FleetScale(1)
        self._versions = 0
        self._told: Mapping[str, Array] = {}
        self.begin(0)

    @property
    def holds(self) -> bool:
        return self._versions < _HELD_VERSIONS or not self._heard.known

    @property
    def told(self) -> Mapping[str, Array]:
        return self._told

    def tell(self, tensors: Mapping[str, Array]) -> None:
        self._told = {name: array for name, array in tensors.items() if array.dtype.kind == "f"}

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._told = {}

    def look_again(self) -> None:
        # Held for the method's sake alone, they are judged by what was known before.
        if self.holds:
            super().look_again()

    def settle(self) -> None:
        super().settle()
        self._versions += 1

    # -- an update ---------------------------------------------------------------------------------

    def note(self, one: Sized) -> None:
        self._heard.note(one.update.sender, (1.0,))
        for name, sizes in self._sizes(one.update, one.expected).items():
            self._scales.note(name, one.update.sender, sizes)

    def judged(self, one: Sized) -> Judged:
        return Judged(self._bounded(one.update, one.expected))

    def _bounded(self, update: Update, expected: Mapping[str, Array]) -> Update:
        if not self._heard.known:
            return update
        moved, furthest = {}, 1.0
        for name, values in self._lengths_of(update):
            held, ratio = self._nearer(name, values, expected.get(name))
            furthest = max(furthest, ratio)
            if held is not values:
                moved[name] = held
        # What moves further weighs less: it is the product that moves a mean.
        claimed = {
            name: held
            for name, counts in self._counts_of(update)
            if (held := self._lessened(name, counts, furthest)) is not counts
        }
        said = {name: self._less(name, value, furthest) for name, value in update.metadata.items()}
        changed = {name for name, value in said.items() if value != update.metadata[name]}
        self._clipped += bool(moved)
        lower = [
            f"{name} {update.metadata[name]:,} as {said[name]:,}"
            for name in changed
            if isinstance(said[name], int)
        ]
        for name, held in claimed.items():
            most, left = int(update.tensors[name].max()), int(held.max())
            lower.append(f"{name} of up to {most:,} as {left:,}")
        if lower:
            self.lower(update.sender, lower[-1])
        if not (moved or claimed or changed):
            return update
        tensors = {**update.tensors, **moved, **claimed}
        return Update(update.round_id, tensors, said, update.sender, age=update.age)

    def _nearer(self, name: str, values: Array, expected: Array | None) -> tuple[Array, float]:
        """``values`` within the limit of their distance, and how many times the usual that is."""
        zero, apart = self._scales.medians(name) or (0.0, 0.0)
        by_rows = name in self._bounds.rows
        wide = _as_rows(values, by_rows)
        about = np.zeros_like(wide)
        usual = np.full(len(wide), zero)
        if expected is not None:
            told = _as_rows(expected, by_rows)
            known = ~np.isnan(told).any(axis=1)
            if not zero and not apart:
                length = float(np.linalg.norm(told[known]))
                usual[:] = _FIRST_LENGTHS * max(length, 1.0) / self._bounds.multiple
                about[known] = told[known]
            elif 0 < apart < zero:
                about[known] = told[known]
                usual[known] = apart
        elif not zero:
            usual[:] = _FIRST_LENGTHS / self._bounds.multiple
        with np.errstate(over="ignore", invalid="ignore"):
            moved = wide - about
            lengths = np.sqrt(np.einsum("ij,ij->i", moved, moved))
        limits = self._bounds.multiple * usual
        far = ~(lengths <= limits)
        ratio = float((np.minimum(lengths, limits) / np.maximum(usual, 1e-300)).max(initial=0.0))
        if not far.any():
            return values, ratio
        factors = limits[far] / lengths[far]
        # Of a distance that float64 cannot hold nothing is left.
        sound = np.isfinite(lengths[far])
        kept = np.where(sound[:, None], moved[far], 0.0) * np.where(sound, factors, 0.0)[:, None]
        nearer = about[far] + kept
        if values.dtype.kind != "f":
            nearer = np.clip(np.rint(nearer), -_LARGEST_WHOLE, _LARGEST_WHOLE)
        held = values.reshape(wide.shape).copy()
        held[far] = nearer
        return held.reshape(values.shape), self._bounds.multiple

    def _lessened(self, name: str, counts: Array, furthest: float) -> Array:
        most = max(1, int(self._most(name) / furthest))
        if not counts.size or (int(counts.min()) >= 0 and int(counts.max()) <= most):
            return counts
        return np.asarray(np.clip(counts, 0, most), counts.dtype)

    def _less(self, name: str, value: Scalar, furthest: float) -> Scalar:
        if isinstance(value, (bool, str)) or name in self._bounds.exact:
            return value
        if isinstance(value, int):
            return min(max(value, 0), max(1, int(self._most(_said(name)) / furthest)))
        most, least = self._both(_said(name))
        return min(max(value, -least / furthest), most / furthest)

    def _most(self, name: str) -> float:
        """What a claim counts for at most; what no majority speaks of, for few samples."""
        return self._both(name)[0] or self._bounds.multiple

    def _both(self, name: str) -> tuple[float, float]:
        """How far above and below zero a number may be: not at all where most are on the other
        side, for a weight below zero would take from the others' sum."""
        multiple = self._bounds.multiple
        above, below = self._scales.medians(name) or (0.0, 0.0)
        return (multiple * above, multiple * below) if above or below else (multiple, multiple)

    # -- what an update is made of -----------------------------------------------------------------

    def _sizes(self, update: Update, expected: Mapping[str, Array]) -> _Sizes:
        """Of each tensor that is not zero its length and its distance from what is expected, of
        bounded rows the middle one's; of a claim how far it is above and below zero."""
        found: _Sizes = {}
        for name, values in self._lengths_of(update):
            by_rows = name in self._bounds.rows
            wide = _as_rows(values, by_rows)
            told = expected.get(name)
            about = None if told is None else _as_rows(told, by_rows)
            with np.errstate(over="ignore", invalid="ignore"):
                lengths = np.sqrt(np.einsum("ij,ij->i", wide, wide))
                moved = np.empty((0, 1)) if about is None else wide - about
                apart = np.sqrt(np.einsum("ij,ij->i", moved, moved))
            if length := _middle(lengths):
                found[name] = length, _middle(apart)
        for name, counts in self._counts_of(update):
            size = float(np.abs(counts.astype(np.float64)).max(initial=0.0))
            found[name] = size, 0.0
        for name, value in update.metadata.items():
            if not isinstance(value, (bool, str)) and name not in self._bounds.exact:
                size = min(max(float(value), -_LARGEST), _LARGEST)
                found[_said(name)] = max(size, 0.0), max(-size, 0.0)
        return found

    def _lengths_of(self, update: Update) -> Iterator[tuple[str, Array]]:
        for name, values in update.tensors.items():
            whole = values.dtype.kind in "iu" and name in self._bounds.values
            if (values.dtype.kind == "f" or whole) and name not in self._bounds.exact:
                yield name, values

    def _counts_of(self, update: Update) -> Iterator[tuple[str, Array]]:
        for name, values in update.tensors.items():
            if values.dtype.kind not in "iu" or name in (*self._bounds.exact, *self._bounds.values):
                continue
            if name in self._bounds.counts or values.ndim == 0:
                yield name, values

    # -- state -------------------------------------------------------------------------------------

    def _schema(self) -> Schema:
        return {**super()._schema(), "versions": COUNT}

    def state(self) -> dict[str, Array]:
        """Everything as named arrays (copies). What was told is in it as long as the round is open:
        another process may have to go on."""
        told = {name: np.array(each) for name, each in self._told.items()}
        return {**super().state(), **prefixed("told.", told)}

    def restored(self, state: State) -> Self:
        """See :class:`~device_sdk.methods.state.Stateful`."""
        own = {name: array for name, array in state.items() if not name.startswith("told.")}
        found = super().restored(own)
        found._told = part("told.", state)
        return found


_LARGEST_WHOLE = 2.0**62
_LARGEST = 1e300
"""Sizes beyond count as this one: voices are finite."""


def _middle(sizes: NDArray[np.float64]) -> float:
    """The lower of two in the middle, of those that are known; 0 without any."""
    known = np.sort(sizes[~np.isnan(sizes)])
    return min(float(known[(len(known) - 1) // 2]), _LARGEST) if len(known) else 0.0


def _as_rows(values: Array, by_rows: bool) -> NDArray[np.float64]:
    """float64 [rows, columns], a copy: the whole as one row unless rows count by themselves."""
    shape = (len(values), -1) if by_rows and values.ndim and values.size else (1, values.size)
    return values.astype(np.float64).reshape(shape)


def _said(name: str) -> str:
    """A name that no tensor has."""
    return f"{name}="


# By norms: of one matrix, or of a whole model.

MOST_MEDIANS = 1024.0
"""Of the fleet's, where no limit of norms holds: a sum of integers has to end somewhere."""
_NORM, _ROW, _OTHERS = 0, 1, 2
_LENGTHS = 1
"""Of the other measures, those that are lengths and come first."""


class Limits(NamedTuple):
    """Each is off at 0.

    Attributes:
        clip_norm: the largest Euclidean norm; 0 for no limit.
        clip_multiple: likewise, as a multiple of the fleet's median norm; see
            :class:`~aggregator.methods.fleet.FleetScale`.
        row_multiple: the largest size of a row, as a multiple of the median of updates' median
            rows; for updates of two dimensions. Sizes are root mean squares, so a device that
            trains few columns is measured as one that trains many.
        outlier_multiple: an update of two dimensions that is out of line by more than this is left
            out; see :class:`~aggregator.methods.fleet.Outliers`.
    """

    clip_norm: float = 0.0
    clip_multiple: float = 0.0
    row_multiple: float = 0.0
    outlier_multiple: float = 0.0


class NormBounding(Bounding):
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

    Args:
        limits: what an update is held to.
        length: of the first model, Euclidean. Until three devices' norms are known, an update of a
            limit that follows may be ten times as long.
        others: further measures; see :meth:`most_length` and :meth:`usual`.

    Memory is that of a thousand numbers.
    """

    PARTS = ("fleet", "outliers")
    ADDED = ("rows",)
    _rows = 0

    def __init__(self, limits: Limits, *, length: float, others: int = 0) -> None:
        super().__init__()
        self._clip_norm, self._clip_multiple = limits.clip_norm, limits.clip_multiple
        self._row_multiple = limits.row_multiple
        self._length = length
        self._fleet = FleetScale(_OTHERS + others)
        multiple = limits.outlier_multiple
        self._outliers = Outliers(multiple) if multiple else None

    @property
    def holds(self) -> bool:
        known = self._fleet.known and (self._outliers is None or self._outliers.known)
        return not known

    def note(self, one: Sized) -> None:
        """One without any length says nothing of what is usual."""
        sender, found = one.update.sender, one.found
        if found.norm > 0 or any(one.others[:_LENGTHS]):
            self._fleet.note(sender, (found.norm, found.median_row, *one.others))
        if self._outliers is not None:
            self._outliers.note(sender, found)

    def judged(self, one: Sized) -> Judged:
        values, factor = self._within(one.values, one.found, one.weight)
        if factor > 0:
            factor = min(factor, one.factor)
        if factor == 0:
            values = values[:0]
        elif factor < 1:
            values = values * np.float32(factor)
            self._clipped += 1
        return Judged(one.update, values, one.others, factor)

    def _within(self, values: Floats, found: Measured, weight: float) -> tuple[Floats, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm; 0 where it is an outlier."""
        if self._outliers is not None and self._outliers.holds(found):
            return values, 0.0
        if not values.size:
            return values, 1.0
        if self._row_multiple and self._fleet.known:
            most = self._row_multiple * self._fleet.median(_ROW)
            if 0 < most < found.largest_row:
                values, count = bounded_rows(values, found.rows, most)
                self._rows += count
                found = measured(values)
        limit = self._clip_norm or math.inf
        if self._clip_multiple:
            following = self._following(_NORM, self._clip_multiple, self._length)
            limit = min(limit, following / max(1.0, weight))
        return values, 1.0 if found.norm <= limit else limit / found.norm

    def most_pull(self, usual: float = 1.0, heaviest: float = 1.0) -> float:
        """The largest norm times weight that :meth:`judged` leaves an update, where ``usual`` is
        the usual weight and none is above ``heaviest``; infinite without a limit of norms."""
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
        """``clipped`` in any case, and in so far as these limits are in use ``bounded_rows`` that
        were scaled down, and ``outliers``."""
        found = {"clipped": float(self._clipped), **super().metrics()}
        if self._row_multiple:
            found["bounded_rows"] = float(self._rows)
        if self._outliers is not None:
            found["outliers"] = float(self._outliers.count)
        return found

    def _schema(self) -> Schema:
        return {**super()._schema(), "length": Entry(np.float64, least=0)}

    def _following(self, measure: int, multiple: float, length: float) -> float:
        median = self._fleet.median(measure) if self._fleet.known else 0.0
        # Where most devices send zeros, or too few are known, there is no scale but the model's.
        return multiple * median if median else _FIRST_LENGTHS * max(length, 1.0)
