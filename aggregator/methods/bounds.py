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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.limits import FleetScale
from aggregator.methods.robust import MOST_HELD_BYTES, HeldUpdates
from device_sdk.methods.state import COUNT, Entry, RestoreError, State, part, prefixed, unpack
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
# The two measures of a tensor, and those of a number.
_ZERO, _APART = 0, 1
_ABOVE, _BELOW = 0, 1


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


class Bounding:
    """Measures and bounds a task's updates, each judged by what was known when its round opened.

    The rounds of a task's first two versions are held until they close, and judged by themselves,
    so that who comes first chooses nothing. While fewer than three devices were heard of there is
    no majority, and nothing is bounded.
    """

    def __init__(self, bounds: UpdateBounds) -> None:
        self._bounds = bounds
        self._scales: dict[str, FleetScale] = {}
        self._heard = FleetScale(1)
        self._versions = self._round = 0
        self.held = HeldUpdates()
        self.told: Mapping[str, Array] = {}
        """Of what the open round's broadcast holds, float arrays that updates are compared with."""
        self.lowered: dict[str, str] = {}
        """Whose claims count for less, since somebody looked, and how: for people."""
        self.shortened = self.fewer = 0
        """Updates of the open round whose tensors were brought nearer, and whose claims of samples
        count for less."""

    # -- a round -----------------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether the open round's updates are held until it closes."""
        return self._versions < _HELD_VERSIONS or not self._heard.known

    @property
    def full(self) -> bool:
        """Whether as many updates are held as memory is set aside for."""
        return self.held.nbytes > MOST_HELD_BYTES

    def begin(self, round_id: int) -> None:
        """A round begins; what was noted in one that made no version is forgotten."""
        self._round = round_id
        self.held, self.told = HeldUpdates(), {}
        self.shortened = self.fewer = 0
        for scale in self._all():
            scale.begin(round_id)

    def look_again(self) -> None:
        """Judge by this round's updates too, all of which were noted."""
        for scale in self._all():
            scale.look_again()

    def settle(self) -> None:
        """The round made a version."""
        self._versions += 1
        for scale in self._all():
            scale.settle()
        if len(self._scales) > _MOST_SCALES:
            # Names that one device made up. Those that a majority uses are known.
            self._scales = {name: each for name, each in self._scales.items() if each.known}

    # -- an update ---------------------------------------------------------------------------------

    def note(self, update: Update, expected: Mapping[str, Array]) -> None:
        """Take note of an update as it came; what is zero says nothing of what is usual."""
        self._heard.note(update.sender, (1.0,))
        for name, sizes in self._sizes(update, expected).items():
            if max(sizes) > 0:
                self._scale(name).note(update.sender, sizes)

    def bounded(self, update: Update, expected: Mapping[str, Array]) -> Update:
        """The update as it counts. One that is within all bounds comes back as it is."""
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
            if (held := self._fewer(name, counts, furthest)) is not counts
        }
        said = {name: self._less(name, value, furthest) for name, value in update.metadata.items()}
        lowered = {name for name, value in said.items() if value != update.metadata[name]}
        self.shortened += bool(moved)
        counted = [name for name in lowered if isinstance(said[name], int)]
        self.fewer += bool(claimed or counted)
        for name in counted:
            self.lowered[update.sender] = f"{name} {update.metadata[name]:,} as {said[name]:,}"
        for name, held in claimed.items():
            most, left = int(update.tensors[name].max()), int(held.max())
            self.lowered[update.sender] = f"{name} of up to {most:,} as {left:,}"
        if not (moved or claimed or lowered):
            return update
        tensors = {**update.tensors, **moved, **claimed}
        return Update(update.round_id, tensors, said, update.sender)

    def _nearer(self, name: str, values: Array, expected: Array | None) -> tuple[Array, float]:
        """``values`` within the limit of their distance, and how many times the usual that is."""
        scale = self._scales.get(name)
        zero, apart = (scale.median(_ZERO), scale.median(_APART)) if scale else (0.0, 0.0)
        if scale is None or not scale.known:
            zero = apart = 0.0
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

    def _fewer(self, name: str, counts: Array, furthest: float) -> Array:
        most = max(1, int(self._most(name) / furthest))
        if not counts.size or (int(counts.min()) >= 0 and int(counts.max()) <= most):
            return counts
        return np.clip(counts, 0, most).astype(counts.dtype)

    def _less(self, name: str, value: Scalar, furthest: float) -> Scalar:
        if isinstance(value, (bool, str)) or name in self._bounds.exact:
            return value
        if isinstance(value, int):
            return min(max(value, 0), max(1, int(self._most(_said(name)) / furthest)))
        most, least = self._both(_said(name))
        return min(max(value, -least / furthest), most / furthest)

    def _most(self, name: str) -> float:
        """What a claim counts for at most; what no majority speaks of, for few samples."""
        return self._both(name)[_ABOVE] or self._bounds.multiple

    def _both(self, name: str) -> tuple[float, float]:
        """How far above and below zero a number may be: not at all where most are on the other
        side, for a weight below zero would take from the others' sum."""
        scale, multiple = self._scales.get(name), self._bounds.multiple
        above, below = (0.0, 0.0) if scale is None else map(scale.median, (_ABOVE, _BELOW))
        if scale is None or not scale.known or not (above or below):
            return multiple, multiple
        return multiple * above, multiple * below

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

    def _scale(self, name: str) -> FleetScale:
        if name not in self._scales:
            self._scales[name] = FleetScale(2)
            self._scales[name].begin(self._round)
        return self._scales[name]

    def _all(self) -> list[FleetScale]:
        return [self._heard, *self._scales.values()]

    # -- state -------------------------------------------------------------------------------------

    def share(self) -> dict[str, Array]:
        """What was noted since the round opened, as named arrays (copies)."""
        found = prefixed("heard.", self._heard.share())
        for name, scale in self._scales.items():
            found.update(prefixed(f"scale.{name}|", scale.share()))
        return {**found, "acted": self._acted}

    @property
    def _acted(self) -> Array:
        return np.asarray([self.shortened, self.fewer], dtype=np.int64)

    def merge(self, share: State) -> None:
        """Add another shard's :meth:`share`. Raises as
        :meth:`~aggregator.methods.sums.Additive.merge`, and changes nothing then."""
        heard = self._heard._read(part("heard.", share))
        acted = unpack({"acted": _ACTED}, {n: a for n, a in share.items() if "." not in n})["acted"]
        others = {name: self._scale(name)._read(own) for name, own in _by_name(share).items()}
        self._heard._add(heard)
        for name, found in others.items():
            self._scale(name)._add(found)
        self.shortened += int(acted[0])
        self.fewer += int(acted[1])

    def state(self) -> dict[str, Array]:
        """Everything, what is held included, as named arrays (copies)."""
        found = {
            "versions": np.asarray(self._versions, dtype=np.int64),
            "round": np.asarray(self._round, dtype=np.int64),
            "acted": self._acted,
        }
        found.update(prefixed("heard.", self._heard.state()))
        for name, scale in self._scales.items():
            found.update(prefixed(f"scale.{name}|", scale.state()))
        found.update(prefixed("held.", self.held.state()))
        found.update({f"told.{name}": np.array(each) for name, each in self.told.items()})
        return found

    def restored(self, state: State) -> Bounding:
        """One that continues from ``state()``; raises RestoreError where it does not fit. What
        holds nothing begins afresh."""
        found = Bounding(self._bounds)
        if not state:
            return found
        own = {name: array for name, array in state.items() if "." not in name}
        counted = unpack({"versions": COUNT, "round": COUNT, "acted": _ACTED}, own)
        found._versions, found._round = int(counted["versions"]), int(counted["round"])
        found.shortened, found.fewer = counted["acted"].tolist()
        found._heard = found._heard.restored(part("heard.", state))
        for name, each in _by_name(state).items():
            found._scales[name] = FleetScale(2).restored(each)
        found.held = found.held.restored(part("held.", state))
        found.told = part("told.", state)
        return found


_ACTED = Entry(np.int64, (2,), least=0)
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
    for key, array in part("scale.", state).items():
        name, bar, rest = key.rpartition("|")
        if not bar:
            raise RestoreError(f"the state's {key!r} is of no measure")
        found.setdefault(name, {})[rest] = array
    return found
