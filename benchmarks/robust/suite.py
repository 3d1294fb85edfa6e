"""Attacks, whatever the method; what the benchmark asks of one: defences, runs and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import markdown_table, named
from benchmarks.recommendation.split import SplitKind
from device_sdk.methods.learner import Learner, State
from device_sdk.wire.arrays.exchange import Broadcast, Update

Attack = Literal["flip", "noise", "promotion", "patient", "opposite", "pattern", "row"]
ATTACKS: tuple[Attack, ...] = ("flip", "noise", "promotion", "patient")
PROMOTING: tuple[Attack, ...] = ("promotion", "patient")
"""Attacks that want an item recommended."""

SINGLE: tuple[Attack, ...] = ("opposite", "pattern", "row")
"""Attacks of one device that takes part in every round, of any magnitude."""
MAGNITUDES = (1.0, 1e3, 1e11)

SHARES = (0.05, 0.2)
"""Of the devices, that are hostile."""
STRENGTH = np.float32(10.0)
"""How much larger than an honest update a loud attack is."""
_FEW = 5


def hostile_devices(order: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The first ``share`` of ``order``: a larger share holds the devices of a smaller one."""
    return order[: round(share * len(order))]


def unpopular_item(known: NDArray[np.int64], rng: np.random.Generator) -> int:
    """One of the items that at least one and at most five users know; ``known`` [items] counts."""
    return int(rng.choice(np.flatnonzero((known >= 1) & (known <= _FEW))))


def noise_like(values: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """Normal noise of the shape of ``values`` and ``STRENGTH`` times their norm."""
    noise = rng.standard_normal(values.shape, dtype=np.float32)
    scaled = noise * (STRENGTH * np.linalg.norm(values) / np.linalg.norm(noise))
    return scaled.astype(np.float32)


_MOST_CLAIMED = 1 << 40
_LARGEST = 1e12
"""Larger values are refused."""


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite of what was found. ``noise`` sends normal noise of ten
    times the norm of each array. ``promotion`` sends ten times what was learnt, and ``patient``
    just that: their learner is given samples in which an item is always clicked.

    Args:
        honest: the device's real learner.
        attack: what is done to its updates.
        rng: draws the noise.
    """

    def __init__(self, honest: Learner, attack: Attack, rng: np.random.Generator) -> None:
        self._honest = honest
        self._attack = attack
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if not all(array.size for array in update.tensors.values()):
            return update
        if self._attack == "flip":
            tensors = _floats(update.tensors, lambda array: array * -STRENGTH)
        elif self._attack == "noise":
            tensors = _floats(update.tensors, lambda array: noise_like(array, self._rng))
        else:
            strength = np.float32(1.0) if self._attack == "patient" else STRENGTH
            tensors = self._promoting(update.tensors, broadcast, strength)
        return replace(update, tensors=tensors)

    def _promoting(
        self, tensors: State, broadcast: Broadcast, strength: np.float32
    ) -> dict[str, NDArray[Any]]:
        return _floats(tensors, lambda array: array * strength)


def _floats(
    tensors: State, change: Callable[[NDArray[np.float32]], NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The arrays, those of float32 changed: others say what they are of."""
    return {
        name: change(array) if array.dtype == np.float32 else array
        for name, array in tensors.items()
    }


class AnyValue(Learner):
    """``opposite`` sends the opposite of what an honest device found, times ``magnitude``.

    ``pattern`` sends random signs times ``magnitude`` in all that it may send, the same in every
    round, so that they add up; ``row`` the same in a single row of the first array. Where samples
    are claimed, each claims as many as it may.

    Args:
        honest: the device's real learner.
        attack: what is sent.
        magnitude: how large.
        rng: draws the signs.
    """

    def __init__(
        self, honest: Learner, attack: Attack, magnitude: float, rng: np.random.Generator
    ) -> None:
        self._honest = honest
        self._attack = attack
        self._magnitude = np.float32(magnitude)
        self._rng = rng
        self._signs: dict[str, NDArray[Any]] = {}

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if self._attack == "opposite":
            tensors = _floats(update.tensors, self._opposite)
        elif "items" in broadcast.tensors:
            tensors = self._of_items(broadcast.tensors["items"].shape)
        else:
            tensors = self._of_model(update.tensors)
        claims = {"samples": _MOST_CLAIMED} if "samples" in update.metadata else {}
        return replace(update, tensors=tensors, metadata={**update.metadata, **claims})

    def _opposite(self, array: NDArray[np.float32]) -> NDArray[Any]:
        opposite: NDArray[Any] = np.clip(-self._magnitude * array, -_LARGEST, _LARGEST)
        return opposite.astype(np.float32)

    def _of_items(self, shape: tuple[int, ...]) -> State:
        rows = np.arange(1 if self._attack == "row" else shape[0], dtype=np.int64)
        values = self._drawn("items", shape)[: len(rows)]
        return {"rows": rows, "columns": np.arange(shape[1], dtype=np.int64), "values": values}

    def _of_model(self, tensors: State) -> State:
        found = {name: self._drawn(name, array.shape) for name, array in tensors.items()}
        if self._attack == "row":
            for place, name in enumerate(sorted(found)):
                found[name][0 if place else 1 :] = 0
        return found

    def _drawn(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if name not in self._signs:
            self._signs[name] = self._rng.choice([-1.0, 1.0], size=shape).astype(np.float32)
        drawn: NDArray[np.float32] = self._signs[name] * self._magnitude
        return drawn


UNPROTECTED = "none"
DEFAULT = "default"


class Case(NamedTuple):
    """An option, an attack ("" for a clean run), and the share of devices that carry it out, or
    the magnitude of a single device's."""

    option: str
    attack: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.option}, {f'{self.attack} {self.share:g}' if self.attack else 'clean'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """By measure, by the share of devices that are hostile; a clean run has all shares, and 0."""

    measures: Mapping[str, Mapping[str, float]]


Found = Mapping[Case, Mapping[int, Outcome]]
"""By seed."""


def change_table(
    found: Found, options: Sequence[str], attacks: Sequence[Attack], measure: str, title: str
) -> str:
    """The measure's mean, and in brackets its change in per cent against the clean run without
    protection, on the same users and seeds."""
    base = found.get(Case(UNPROTECTED), {})
    lines = []
    for option in options:
        clean = found.get(Case(option), {})
        attacked = [Case(option, one, share) for share in SHARES for one in attacks]
        cells = [_changed(found.get(case, {}), base, measure, case.share) for case in attacked]
        lines.append((option, len(clean), _changed(clean, base, measure, 0.0), *cells))
    headers = (title, "seeds", "clean", *_attack_headers(attacks))
    return markdown_table(lines, headers)


def promotion_table(
    found: Found, options: Sequence[str], attacks: Sequence[Attack], measure: str, title: str
) -> str:
    """The measure's mean in per cent under those attacks that promote an item."""
    promoting = [attack for attack in attacks if attack in PROMOTING]
    lines = []
    for option in options:
        cells = []
        for case in (
            Case(option),
            *(Case(option, a, share) for share in SHARES for a in promoting),
        ):
            values = _values(found.get(case, {}), measure, case.share)
            cells.append(f"{100 * fmean(values.values()):.1f} %" if values else "")
        lines.append((option, *cells))
    headers = (title, "clean", *_attack_headers(promoting))
    return markdown_table(lines, headers)


def single_table(found: Found, share: float, measure: str, title: str) -> str:
    """The measure's mean where one device, ``share`` of all, sends any value in every round, and
    its change in per cent against no attack and no limits, on the same users and seeds. The cases'
    shares are magnitudes."""
    base = found.get(Case(UNPROTECTED), {})
    lines = []
    for option in (UNPROTECTED, DEFAULT):
        clean = found.get(Case(option), {})
        cell = _changed(clean, base, measure, share)
        lines.append((f"{option}, no attack", len(clean), cell, "", ""))
    for attack in SINGLE:
        attacked = [found.get(Case(DEFAULT, attack, each), {}) for each in MAGNITUDES]
        if any(attacked):
            cells = [_changed(each, base, measure, share) for each in attacked]
            lines.append((f"{DEFAULT}, {attack}", max(map(len, attacked)), *cells))
    headers = (title, "seeds", *(f"times {each:g}" for each in MAGNITUDES))
    return markdown_table(lines, headers)


def _values(by_seed: Mapping[int, Outcome], measure: str, share: float) -> dict[int, float]:
    """By seed, where it was measured for this share."""
    found = {seed: one.measures[measure].get(str(share)) for seed, one in by_seed.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _changed(
    by_seed: Mapping[int, Outcome], base: Mapping[int, Outcome], measure: str, share: float
) -> str:
    """The mean; and in brackets the mean change in per cent against the same seeds of ``base``."""
    values, before = _values(by_seed, measure, share), _values(base, measure, share)
    if not values:
        return ""
    changes = [100 * (values[seed] / before[seed] - 1) for seed in values if seed in before]
    text = f"{fmean(values.values()):.4f}"
    return f"{text} ({fmean(changes):+.1f} %)" if changes else text


def _attack_headers(attacks: Sequence[Attack]) -> list[str]:
    return [f"{attack}, {share:.0%}" for share in SHARES for attack in attacks]


ExperimentT = TypeVar("ExperimentT", bound=Any)
SettingsT = TypeVar("SettingsT", bound=Any)


@dataclass(frozen=True, slots=True)
class Trial(Generic[ExperimentT]):
    """``share`` of the devices carry out ``attack``; 0 and None for a clean run.

    ``magnitude``: of an attack of a single device; 0 for others.
    """

    experiment: ExperimentT
    attack: Attack | None
    share: float
    magnitude: float = 0.0

    def __post_init__(self) -> None:
        if (self.attack is None) != (self.share == 0) or not 0 <= self.share < 1:
            raise ValueError(f"attack {self.attack!r} does not go with a share of {self.share}")
        known = SINGLE if self.magnitude else ATTACKS
        if self.attack is not None and self.attack not in known:
            raise ValueError(f"attack is {self.attack!r}; expected one of {', '.join(known)}")

    def shares(self, devices: int) -> tuple[float, ...]:
        """Without whom the others are measured: a clean run is compared with any other."""
        return (0.0, 1 / devices, *SHARES) if self.attack is None else (self.share,)


@dataclass(frozen=True, slots=True)
class Option:
    """A line of a table: what it shows, and which of the method's settings it changes."""

    name: str
    shows: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def change(self, settings: SettingsT) -> SettingsT:
        """The settings under this option."""
        return replace(settings, **self.changes)


@dataclass(frozen=True)
class Method(Generic[ExperimentT]):
    """A method's part of the benchmark.

    Attributes:
        title: what its table is of.
        kind: of its experiments.
        options: its defences, of which the first is ``UNPROTECTED``.
        attacks: on it.
        devices: of the fleet.
        experiment: of a split, a seed and rounds (0 for the usual number), without protection.
        execute: carries out a trial; of the command line's options, telling of its progress.
        changes: titles of the measures whose change is shown; the first is shown of one device.
        promotions: titles of those that promoting an item moves.
    """

    title: str
    kind: type[ExperimentT]
    options: Sequence[Option]
    attacks: Sequence[Attack]
    devices: int
    experiment: Callable[[SplitKind, int, int], ExperimentT]
    execute: Callable[[Trial[ExperimentT], argparse.Namespace, Callable[[str], None]], Outcome]
    changes: Mapping[str, str]
    promotions: Mapping[str, str]

    def trial(self, case: Case, seed: int, options: argparse.Namespace) -> Trial[ExperimentT]:
        """The case's run of a seed."""
        (option,) = (one for one in self.options if one.name == case.option)
        base = self.experiment(options.split, seed, options.epochs)
        experiment = replace(base, settings=option.change(base.settings))
        if not case.attack:
            return Trial(experiment, None, 0.0)
        single = options.one_device
        share, magnitude = (1 / self.devices, case.share) if single else (case.share, 0.0)
        return Trial(experiment, cast(Attack, case.attack), share, magnitude)

    def cases(self, options: argparse.Namespace) -> Iterator[Case]:
        """Those that the command line asks for; of one device, with magnitudes for shares."""
        if options.one_device:
            yield from (Case(UNPROTECTED), Case(DEFAULT))
            for magnitude, attack in product(
                MAGNITUDES, named(options.attacks, SINGLE, "--attacks")
            ):
                yield Case(DEFAULT, attack, magnitude)
            return
        attacks = named(options.attacks, ATTACKS, "--attacks")
        for option in self.options:
            if option.name in options.options:
                yield Case(option.name)
                for share, attack in product(options.shares, self.attacks):
                    if attack in attacks:
                        yield Case(option.name, attack, share)

    def tables(self, found: Found, options: argparse.Namespace) -> Iterator[str]:
        """Those of what was found."""
        if options.one_device:
            measure, title = next(iter(self.changes.items()))
            others = f"{title} of the others than one device that sends any value in every round"
            yield single_table(found, 1 / self.devices, measure, others)
            return
        rows = [one.name for one in self.options if one.name in options.options]
        for measure, title in self.changes.items():
            yield change_table(found, rows, self.attacks, measure, title)
        for measure, title in self.promotions.items():
            yield promotion_table(found, rows, self.attacks, measure, title)
