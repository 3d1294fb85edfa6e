"""What the benchmark asks of a method: its defences, the attacks on it, runs and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.harness import Run, StoredRuns, key_of, progress_line
from benchmarks.recommendation.split import SplitKind
from benchmarks.robust.attacks import ATTACKS, MAGNITUDES, SINGLE, Attack
from benchmarks.robust.table import DEFAULT, UNPROTECTED, Found, OutcomeT

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
        self, selection: Selection, results: Path, *, table_only: bool
    ) -> dict[tuple[str, str, float], dict[int, OutcomeT]]:
        """Stored outcomes, and unless ``table_only`` those of runs that were missing."""
        store = StoredRuns[Trial[ExperimentT], OutcomeT](results, "robust", self.outcome)
        found: dict[tuple[str, str, float], dict[int, OutcomeT]] = {}
        # Seeds outside: what is stopped early has all defences on the first seeds.
        for seed in selection.seeds:
            for option, attack, share in self._cases(selection):
                experiment = self.experiment(selection.split, seed, option, selection.rounds)
                trial = Trial(experiment, attack, share)
                words = f"{share:.0%} {attack}" if attack else "clean"
                run = partial(self._watched, trial, f"seed {seed}, {option.name}, {words}")
                outcome = store.found_or_made(trial, None if table_only else run)
                if outcome is not None:
                    found.setdefault((option.name, attack or "", share), {})[seed] = outcome
        return found

    def found_single(
        self, selection: Selection, results: Path, *, table_only: bool
    ) -> dict[tuple[str, str, float], dict[int, OutcomeT]]:
        """Likewise, of runs in which one device sends any value in every round; by option, attack
        and magnitude."""
        store = StoredRuns[Trial[ExperimentT], OutcomeT](results, "robust", self.outcome)
        found: dict[tuple[str, str, float], dict[int, OutcomeT]] = {}
        cases = [
            *((name, None, 0.0) for name in (UNPROTECTED, DEFAULT)),
            *((DEFAULT, attack, each) for each in MAGNITUDES for attack in SINGLE),
        ]
        options = {option.name: option for option in self.options}
        for seed in selection.seeds:
            for name, attack, magnitude in cases:
                if attack is not None and attack not in selection.single:
                    continue
                experiment = self.experiment(selection.split, seed, options[name], selection.rounds)
                share = 0.0 if attack is None else 1 / self.devices
                trial = Trial(experiment, attack, share, magnitude)
                words = f"one {attack} times {magnitude:g}" if attack else "clean"
                run = partial(self._watched, trial, f"seed {seed}, {name}, {words}")
                outcome = store.found_or_made(trial, None if table_only else run)
                if outcome is not None:
                    found.setdefault((name, attack or "", magnitude), {})[seed] = outcome
        return found

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

    @abstractmethod
    def difference_tables(self, found: Found[OutcomeT], before: Found[OutcomeT]) -> list[str]:
        """The tables of what was found, next to what the same runs found before."""

    def _watched(self, trial: Trial[ExperimentT], label: str) -> OutcomeT:
        with progress_line(label) as progress:
            return self.run(trial, progress)

    def _cases(self, selection: Selection) -> Iterator[tuple[Option, Attack | None, float]]:
        for option in self.options:
            if option.name not in selection.options:
                continue
            yield option, None, 0.0
            for share in selection.shares:
                for attack in self.attacks:
                    if attack in selection.attacks:
                        yield option, attack, share


def changed(**fields: Any) -> Callable[[Any], Any]:
    """What sets these fields of a method's settings."""

    def change(base: SettingsT) -> SettingsT:
        return replace(base, **fields)

    return change
