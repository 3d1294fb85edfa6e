"""What one sender's update may do, whatever the method: the stage between ``check`` and ``absorb``.

A method is its formula. What its updates hold is measured here, against what is usual in the fleet,
and held to a multiple of that before the method sees it: tensors by their distance from what the
round told the devices (or from zero, whichever the fleet is nearer to), numbers of samples and the
like by their size. So one device of n moves a mean by at most ``multiple`` usual contributions out
of n, whatever it sends and claims, and no other device is handed more of it than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.limits import FleetScale
from aggregator.methods.sums import Additive
from device_sdk.methods.state import COUNT, Schema, State, part, prefixed, unpack
from device_sdk.wire.arrays.exchange import Scalar, Update

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
