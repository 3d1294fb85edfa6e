"""Methods whose updates are matrices: bounded by the fleet's norms, weighed, summed as integers.

The sums' scale follows from the bounds, so a round adds up, over any shards to the same bits, once
the fleet is known and unless a ``robust`` rule needs all of a round's updates at once. What does
not add up is held, and judged by itself when the round closes: in a task's first round, and while
fewer than three devices were heard of.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import (
    LEAST_VOICES,
    FleetScale,
    Measured,
    Voice,
    Voices,
    bounded_rows,
    measured,
)
from aggregator.methods.method import Method, NoVersion
from aggregator.methods.robust import RobustRule
from aggregator.methods.sums import Additive
from device_sdk.methods.state import COUNT, Entry, RestoreError, Schema
from device_sdk.wire.arrays.exchange import Update

Floats = NDArray[np.float32]

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


class Limits(NamedTuple):
    """Each is off at 0.

    Attributes:
        clip_norm: the largest Euclidean norm; 0 for no limit.
        clip_multiple: likewise, as a multiple of the fleet's median norm; see
            :class:`~aggregator.methods.bounds.FleetScale`.
        row_multiple: the largest size of a row, as a multiple of the median of updates' median
            rows; for updates of two dimensions. Sizes are root mean squares, so a device that
            trains few columns is measured as one that trains many.
        outlier_multiple: an update of two dimensions that is out of line by more than this is left
            out; see :class:`~aggregator.methods.summing.Outliers`.
    """

    clip_norm: float = 0.0
    clip_multiple: float = 0.0
    row_multiple: float = 0.0
    outlier_multiple: float = 0.0


class UpdateLimits(Additive):
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

    Updates are judged by what was known when their round opened, so that their order within it
    says nothing. Where all of a round's are held until it closes, as they are while :attr:`known`
    is false, all are noted first, then :meth:`look_again`, and judged by each other.

    Args:
        limits: what an update is held to.
        length: of the first model, Euclidean. Until three devices' norms are known, an update of a
            limit that follows may be ten times as long.
        others: further measures; see :meth:`most_length` and :meth:`usual`.

    Memory is that of a thousand numbers.
    """

    PARTS = ("fleet", "outliers")
    ADDED = ("bounded",)

    def __init__(self, limits: Limits, *, length: float, others: int = 0) -> None:
        self._clip_norm, self._clip_multiple = limits.clip_norm, limits.clip_multiple
        self._row_multiple = limits.row_multiple
        self._length = length
        self._fleet = FleetScale(_OTHERS + others)
        multiple = limits.outlier_multiple
        self._outliers = Outliers(multiple) if multiple else None
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

    def apply(self, values: Floats, found: Measured, weight: float = 1.0) -> tuple[Floats, float]:
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


# The stages of such a method.


class Sized(NamedTuple):
    """An update as it came: ``values`` [rows, columns], how large they are, and what else limits
    take note of, lengths first."""

    update: Update
    values: Floats
    found: Measured
    others: tuple[float, ...] = ()


class Judged(NamedTuple):
    """An update as it counts: ``values`` are multiplied by ``factor``, 0 to 1, already. Of 0, an
    outlier, no row is left."""

    update: Update
    values: Floats
    others: tuple[float, ...]
    factor: float


class SummingMethod(Method):
    """A method most of whose rounds add up. It writes, in the place of ``add``, :meth:`sized`,
    :meth:`sum_up` and :meth:`sum_held`, and makes its sums in :meth:`begin_sums`."""

    # By limits of their own: those that a sum of integers takes its scale from.
    bounds = None
    SHARDS = True
    PARTS: ClassVar[tuple[str, ...]] = ("limits",)
    ADDED: ClassVar[tuple[str, ...]] = ("clipped",)
    _limits: UpdateLimits
    _rule: RobustRule
    _adds_up = 0
    _clipped = 0

    # -- the formula -------------------------------------------------------------------------------

    @abstractmethod
    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        """Decode checked updates, in groups that are summed together."""

    @abstractmethod
    def begin_sums(self) -> None:
        """The round adds up: make its sums, at a scale that the limits bound."""

    @abstractmethod
    def sum_up(self, judged: Sequence[Judged]) -> None:
        """Add a group of updates as they count."""

    @abstractmethod
    def sum_held(self, judged: Iterable[Judged], largest: float) -> None:
        """Likewise all of a round's, none of which is known to be larger than ``largest``, in sums
        that are made for them, or by the robust rule. ``judged`` is made as it is gone through."""

    def follow(self) -> None:
        """What is known of the fleet changed, and with it what ``require`` takes. Here: nothing."""

    def heavier(self, one: Sized) -> float:
        """How many times what is usual an update weighs: it may be that much less long."""
        return 1.0

    def shorter(self, one: Sized) -> float:
        """What an update within the limits of its norm has to be multiplied by, at most 1."""
        return 1.0

    def add(self, update: Update) -> None:
        """Decode, bound, weigh and sum one that was not held."""
        self._count([update])

    # -- the stages --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self._rule.holds

    @property
    def _holds(self) -> bool:
        return not self._adds_up

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._adds_up = 0
        self._parts_follow()
        self.follow()

    def _open(self) -> None:
        if self._limits.known and not self.keeps:
            self._adds_up = 1
            self.follow()
            self.begin_sums()

    def _count(self, updates: Iterable[Update]) -> None:
        for group in self.sized(updates):
            for one in group:
                self._limits.note(one.update.sender, one.found, one.others)
            self.sum_up([self._judged(one) for one in group])

    def _judged(self, one: Sized) -> Judged:
        values, factor = self._limits.apply(one.values, one.found, self.heavier(one))
        if factor > 0:
            factor = min(factor, self.shorter(one))
        if factor == 0:
            values = values[:0]
        elif factor < 1:
            values = values * np.float32(factor)
            self._clipped += 1
        return Judged(one.update, values, one.others, factor)

    def _count_held(self) -> None:
        largest = 0.0
        # Decoded twice, one by one: what they unfold to may be many times what is held.
        for one in self._held_sized():
            largest = max(largest, one.found.norm)
            self._limits.note(one.update.sender, one.found, one.others)
        self._limits.look_again()
        self.follow()
        self.sum_held(map(self._judged, self._held_sized()), largest)

    def _held_sized(self) -> Iterator[Sized]:
        for update in self._held:
            for group in self.sized([update]):
                yield from group

    def figures(self) -> dict[str, float]:
        """Of the round: ``clipped`` updates, and the limits' figures."""
        return {"clipped": float(self._clipped), **self._limits.metrics()}

    def _schema(self) -> Schema:
        return {**super()._schema(), "adds_up": COUNT}

    def _require_sound(self) -> None:
        if self._adds_up and self.keeps:
            raise RestoreError(
                "the state is of a round that was opened with another 'robust': set it back until "
                "that round is closed"
            )
        self.follow()


def finite(what: str, moved: NDArray[Any]) -> NDArray[Any]:
    """The new version's numbers. Raises NoVersion where one is not finite."""
    if not np.isfinite(moved).all():
        raise NoVersion(
            f"the server's step made the {what} non-finite; lower the learning rate or set "
            "clip_norm"
        )
    return moved
