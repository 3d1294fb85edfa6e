"""What one sender's update may do, whatever the method: the stage between ``check`` and ``absorb``.

A method is its formula. What its updates hold is measured here, against what is usual in the fleet,
and held to a multiple of that before the method sees it: tensors by their distance from what the
round told the devices (or from zero, whichever the fleet is nearer to), numbers of samples and the
like by their size. So one device of n moves a mean by at most ``multiple`` usual contributions out
of n, whatever it sends and claims, and no other device is handed more of it than that.
"""

from __future__ import annotations

import math
import struct
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from device_sdk.wire.arrays.exchange import Scalar, Update

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


# The stage that every method gets.

Array = NDArray[Any]
_Sizes = dict[str, tuple[float, float]]

_HELD_VERSIONS = 2
"""So many versions' rounds are held until they close. In the first nothing is known of the fleet;
what the devices are told they may differ from by themselves only from the second on."""
_FIRST_LENGTHS = 10.0
"""Lengths of what was told that a tensor may be away from it, where no majority speaks of it."""
_MOST_SCALES = 4096
"""As many as an update may have arrays."""


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

    def state(self) -> dict[str, Array]:
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

    def share(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
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


class Bounding(Additive):
    """Measures and bounds a task's updates, each judged by what was known when its round opened.

    The rounds of a task's first two versions are held until they close, and judged by themselves,
    so that who comes first chooses nothing. While fewer than three devices were heard of there is
    no majority, and nothing is bounded.
    """

    PARTS = ("heard", "scales")
    ADDED = ("shortened", "fewer")
    _shortened: int
    _fewer: int

    def __init__(self, bounds: UpdateBounds) -> None:
        self._bounds = bounds
        self._scales, self._heard = FleetScales(), FleetScale(1)
        self._versions = 0
        self.told: Mapping[str, Array] = {}
        """Of what the open round's broadcast holds, float arrays that updates are compared with."""
        self.begin(0)

    @property
    def holds(self) -> bool:
        """Whether the open round's updates are held until it closes."""
        return self._versions < _HELD_VERSIONS or not self._heard.known

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self.told = {}

    def settle(self) -> None:
        super().settle()
        self._versions += 1

    def metrics(self) -> dict[str, float]:
        """``shortened`` updates of the round, whose tensors were brought nearer, and
        ``fewer_samples``, whose claims count for less; where there are any."""
        acted = {"shortened": self._shortened, "fewer_samples": self._fewer}
        return {name: float(count) for name, count in acted.items() if count}

    # -- an update ---------------------------------------------------------------------------------

    def note(self, update: Update, expected: Mapping[str, Array]) -> None:
        """Take note of an update as it came."""
        self._heard.note(update.sender, (1.0,))
        for name, sizes in self._sizes(update, expected).items():
            self._scales.note(name, update.sender, sizes)

    def bounded(
        self, update: Update, expected: Mapping[str, Array], lowered: dict[str, str]
    ) -> Update:
        """The update as it counts. One that is within all bounds comes back as it is. ``lowered``
        is told whose claims count for less than they say, and how."""
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
        self._shortened += bool(moved)
        counted = [name for name in changed if isinstance(said[name], int)]
        self._fewer += bool(claimed or counted)
        for name in counted:
            lowered[update.sender] = f"{name} {update.metadata[name]:,} as {said[name]:,}"
        for name, held in claimed.items():
            most, left = int(update.tensors[name].max()), int(held.max())
            lowered[update.sender] = f"{name} of up to {most:,} as {left:,}"
        if not (moved or claimed or changed):
            return update
        tensors = {**update.tensors, **moved, **claimed}
        return Update(update.round_id, tensors, said, update.sender)

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
        return {**super().state(), **{f"told.{n}": np.array(each) for n, each in self.told.items()}}

    def restored(self, state: State) -> Self:
        """See :class:`~device_sdk.methods.state.Stateful`."""
        own = {name: array for name, array in state.items() if not name.startswith("told.")}
        found = super().restored(own)
        found.told = part("told.", state)
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


def _by_name(state: State) -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    for key, array in state.items():
        name, bar, rest = key.rpartition("|")
        if bar:
            found.setdefault(name, {})[rest] = array
    return found
