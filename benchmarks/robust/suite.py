"""What the benchmark asks of a method: its defences, the attacks on it, runs and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from aggregator.simulate.shown import spread
from benchmarks.harness import Run, StoredRuns, finished, key_of, markdown_table
from benchmarks.recommendation.split import SplitKind
from benchmarks.robust.attacks import ATTACKS, MAGNITUDES, PROMOTING, SHARES, SINGLE, Attack

UNPROTECTED = "none"
DEFAULT = "default"

OutcomeT = TypeVar("OutcomeT")


class Case(NamedTuple):
    """An option, an attack ("" for a clean run), and the share of devices that carry it out, or
    the magnitude of a single device's."""

    option: str
    attack: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.option}, {f'{self.attack} {self.share:g}' if self.attack else 'clean'}"


Found = Mapping[tuple[str, str, float], Mapping[int, OutcomeT]]
"""By :class:`Case`; then by seed."""
Measure = Callable[[OutcomeT], Mapping[str, float]]
"""A measure of an outcome, by the share of devices that are hostile."""


def change_table(
    found: Found[OutcomeT],
    options: Sequence[str],
    attacks: Sequence[Attack],
    measure: Measure[OutcomeT],
    title: str,
) -> str:
    """The measure's mean, and in brackets its change in per cent against the clean run without
    protection, on the same users and seeds."""
    base = found.get((UNPROTECTED, "", 0.0), {})

    def cell(by_seed: Mapping[int, OutcomeT], share: float) -> str:
        if not by_seed:
            return ""
        mean = spread([measure(one)[str(share)] for one in by_seed.values()]).mean
        changes = [
            100 * (measure(one)[str(share)] / measure(base[seed])[str(share)] - 1)
            for seed, one in by_seed.items()
            if seed in base
        ]
        return f"{mean:.4f} ({spread(changes).mean:+.1f} %)" if changes else f"{mean:.4f}"

    lines = []
    for option in options:
        clean = found.get((option, "", 0.0), {})
        cells = [cell(clean, 0.0)]
        for share in SHARES:
            cells += [cell(found.get((option, one, share), {}), share) for one in attacks]
        lines.append((option, len(clean), *cells))
    headers = (title, "seeds", "clean", *_attack_headers(attacks))
    return markdown_table(lines, headers)


def promotion_table(
    found: Found[OutcomeT],
    options: Sequence[str],
    attacks: Sequence[Attack],
    measure: Measure[OutcomeT],
    title: str,
) -> str:
    """The measure's mean in per cent under those attacks that promote an item."""
    promoting = [attack for attack in attacks if attack in PROMOTING]
    lines = []
    for option in options:
        cells = []
        attacked = [(share, attack) for share in SHARES for attack in promoting]
        for share, attack in ((0.0, ""), *attacked):
            by_seed = found.get((option, attack, share), {})
            values = [100 * measure(one)[str(share)] for one in by_seed.values()]
            cells.append(f"{spread(values).mean:.1f} %" if values else "")
        lines.append((option, *cells))
    headers = (title, "clean", *_attack_headers(promoting))
    return markdown_table(lines, headers)


def single_table(
    found: Found[OutcomeT], share: float, measure: Measure[OutcomeT], title: str
) -> str:
    """The measure's mean where one device sends any value in every round, and its change in per
    cent against no attack and no limits, on the same users and seeds. ``found``: by option, attack
    and magnitude; clean runs that did not measure the others of a single device are left out."""
    found = {
        case: {seed: one for seed, one in by_seed.items() if str(share) in measure(one)}
        for case, by_seed in found.items()
    }
    base = found.get((UNPROTECTED, "", 0.0), {})

    def cell(by_seed: Mapping[int, OutcomeT]) -> str:
        values = [measure(one)[str(share)] for one in by_seed.values()]
        changes = [
            100 * (measure(one)[str(share)] / measure(base[seed])[str(share)] - 1)
            for seed, one in by_seed.items()
            if seed in base
        ]
        if not changes:
            return ""
        return f"{spread(values).mean:.4f} ({spread(changes).mean:+.1f} %)"

    lines = []
    for option in (UNPROTECTED, DEFAULT):
        clean = found.get((option, "", 0.0), {})
        lines.append((f"{option}, no attack", len(clean), cell(clean), "", ""))
    for attack in SINGLE:
        attacked = [found.get((DEFAULT, attack, each), {}) for each in MAGNITUDES]
        if any(attacked):
            seeds = max(len(each) for each in attacked)
            lines.append((f"{DEFAULT}, {attack}", seeds, *map(cell, attacked)))
    headers = (title, "seeds", *(f"times {each:g}" for each in MAGNITUDES))
    return markdown_table(lines, headers)


def _attack_headers(attacks: Sequence[Attack]) -> list[str]:
    return [f"{attack}, {share:.0%}" for share in SHARES for attack in attacks]


_REVISION = 1
"""Part of every key: raise it when attacks or what is measured change."""


ExperimentT = TypeVar("ExperimentT", bound=Run)


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

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        described = [_REVISION, self.experiment.key, self.attack, self.share]
        if self.magnitude:
            described.append(self.magnitude)
        return key_of(described)


SettingsT = TypeVar("SettingsT", bound=Any)


@dataclass(frozen=True, slots=True)
class Option:
    """A line of a table: what it shows, and how it changes the method's settings."""

    name: str
    shows: str
    change: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for. ``rounds`` 0 stands for as many as the method's experiments have."""

    split: SplitKind
    seeds: Sequence[int]
    options: Sequence[str]
    attacks: Sequence[Attack]
    shares: Sequence[float]
    rounds: int = 0
    single: Sequence[Attack] = SINGLE


class Suite(ABC, Generic[ExperimentT, OutcomeT]):
    """A method's part of the benchmark. Its first option is ``UNPROTECTED``."""

    options: Sequence[Option]
    attacks: Sequence[Attack]
    outcome: type[OutcomeT]
    devices: int
    """Of the fleet."""

    def found(
        self, selection: Selection, results: Path, *, single: bool, table_only: bool
    ) -> dict[tuple[str, str, float], dict[int, OutcomeT]]:
        """Stored outcomes, and unless ``table_only`` those of runs that were missing. ``single``:
        of runs in which one device sends any value in every round, by magnitude."""
        store = StoredRuns[Trial[ExperimentT], OutcomeT](results, "robust", self.outcome)
        options = {option.name: option for option in self.options}
        cases = list(self._single_cases(selection) if single else self._cases(selection))

        def trial(case: Case, seed: int) -> Trial[ExperimentT]:
            option = options[case.option]
            experiment = self.experiment(selection.split, seed, option, selection.rounds)
            if not case.attack:
                return Trial(experiment, None, 0.0)
            share, magnitude = (1 / self.devices, case.share) if single else (case.share, 0.0)
            return Trial(experiment, cast(Attack, case.attack), share, magnitude)

        # Seeds outside: what is stopped early has all defences on the first seeds.
        asked = ((case, seed, trial(case, seed)) for seed in selection.seeds for case in cases)
        return {**finished(asked, store, None if table_only else self.run)}

    @abstractmethod
    def single_table(self, found: Found[OutcomeT]) -> str:
        """The table of what :meth:`found_single` found."""

    @abstractmethod
    def experiment(self, split: SplitKind, seed: int, option: Option, rounds: int) -> ExperimentT:
        """The run of a seed under an option; ``rounds`` 0 for the usual number."""

    @abstractmethod
    def run(self, trial: Trial[ExperimentT], progress: Callable[[str], None]) -> OutcomeT:
        """Carry out a trial."""

    @abstractmethod
    def tables(self, found: Found[OutcomeT], options: Sequence[str]) -> list[str]:
        """The tables of what was found."""

    def _cases(self, selection: Selection) -> Iterator[Case]:
        for option in self.options:
            if option.name in selection.options:
                yield Case(option.name)
                for share, attack in product(selection.shares, self.attacks):
                    if attack in selection.attacks:
                        yield Case(option.name, attack, share)

    def _single_cases(self, selection: Selection) -> Iterator[Case]:
        yield from (Case(UNPROTECTED), Case(DEFAULT))
        for magnitude, attack in product(MAGNITUDES, SINGLE):
            if attack in selection.single:
                yield Case(DEFAULT, attack, magnitude)


def changed(**fields: Any) -> Callable[[Any], Any]:
    """What sets these fields of a method's settings."""

    def change(base: SettingsT) -> SettingsT:
        return replace(base, **fields)

    return change
