"""What the virtual devices are like: how fast, of which class, and what goes wrong on them.

Virtual time is a device's own: for 1,000 samples of the whole model one of speed 1 takes ``pace``
seconds, and a part of the model takes that part of it. Nothing is measured, so a seed repeats it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError, TaskError
from aggregator.tables import TomlTable
from device_sdk.capability.fit import Request
from device_sdk.fields import Declared, Within

Chance = Annotated[float, Within(0, 1)]
_LOGNORMAL = re.compile(r"lognormal:([0-9]*\.?[0-9]+)")
_MOST_CLASSES = 64
_QUARTERS = ("slowest quarter", "slower quarter", "quicker quarter", "quickest quarter")


class StreamPurpose(IntEnum):
    """What a stream of random numbers is for: the second entry of its seed."""

    MODEL = 0
    """As an aggregator's with this seed in its store."""
    DATA = 1
    FLEET = 2
    FATES = 3
    PUBLISH = 4
    TRAIN = 5


def stream(seed: int, purpose: StreamPurpose, *rest: int) -> np.random.Generator:
    """The generator of a purpose; ``rest``: of which round, of which device."""
    return np.random.default_rng([seed, int(purpose), *rest])


class Fate(IntEnum):
    """What happens to a device in a round that selects it."""

    ANSWERS = 0
    SILENT = 1
    """It is away: it neither receives nor trains."""
    CRASHES = 2
    """It dies in its training: nothing of it is kept."""
    LATE = 3
    """It trains and keeps that, but its update comes after the round's end."""
    SPOILT = 4
    """Its update holds NaN."""


@dataclass(frozen=True, slots=True)
class Failures(Declared):
    """How likely a device meets each fate in a round, 0 to 1 each.

    Raises ValueError, naming the option.
    """

    dropout: Chance = 0.0
    crash: Chance = 0.0
    late: Chance = 0.0
    nan: Chance = 0.0

    def check(self) -> None:
        if self.dropout + self.crash + self.late + self.nan > 1:
            raise ValueError("--dropout, --crash, --late and --nan are more than 1 together")


@dataclass(frozen=True, slots=True)
class CapabilityClass:
    """A table ``[[class]]`` of a file of classes.

    Attributes:
        name: for people.
        share: of the fleet, relative to the other classes'.
        speed: times that of a device of speed 1.
        k: with scatter, the columns that it trains; 0: as many as its speed allows.
        artifact: of a task with several, the one that it trains, by name.
        dropout: as ``--dropout``, of these devices, where that is more.
    """

    name: str
    share: Annotated[float, Within(0, above=True)] = 1.0
    speed: Annotated[float, Within(0, above=True)] = 1.0
    k: Annotated[int, Within(0, 65_536)] = 0
    artifact: str | None = None
    dropout: Chance = 0.0


ALIKE = (CapabilityClass("all"),)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Where devices' speeds come from: classes, and a spread within each of them (the standard
    deviation of the logarithm)."""

    classes: tuple[CapabilityClass, ...] = ALIKE
    spread: float = 0.0

    @classmethod
    def read(cls, said: str) -> Speeds:
        """``lognormal:0.5``, a file of classes, or k of equal classes as in ``k:8,16,32,64``.

        Raises AggregatorError.
        """
        if match := _LOGNORMAL.fullmatch(said):
            return cls(spread=float(match[1]))
        if match_k := re.fullmatch(r"k:([1-9][0-9]{0,4}(?:,[1-9][0-9]{0,4})*)", said):
            widths = [int(each) for each in match_k[1].split(",")]
            return cls(tuple(CapabilityClass(f"k={k}", k=k) for k in widths))
        path = Path(said)
        if not path.is_file():
            raise AggregatorError(
                f"--speeds is {said!r}; expected lognormal:0.5, k:8,16,32 or a file of classes"
            )
        try:
            return cls(_read_classes(path))
        except TaskError as error:
            raise AggregatorError(f"{path}: {error}") from None


def _read_classes(path: Path) -> tuple[CapabilityClass, ...]:
    try:
        root = TomlTable(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"cannot be read as TOML: {error}") from None
    tables = root.array("class", _MOST_CLASSES)
    root.end()
    if not tables or not all(isinstance(each, dict) for each in tables):
        raise TaskError("class must be tables [[class]], at least one")
    return tuple(_class(each, place) for place, each in enumerate(tables, 1))


def _class(values: Mapping[str, Any], place: int) -> CapabilityClass:
    table = TomlTable(values, f"class {place}")
    return table.read(CapabilityClass, CapabilityClass(name=f"class {place}"))


@dataclass(frozen=True)
class VirtualFleet:
    """So many devices, dealt by ``seed``.

    Attributes:
        devices: how many.
        seed: of the run.
        speeds, failures: what was asked for.
        pace_seconds: what 1,000 samples of the whole model take at speed 1.
    """

    devices: int
    seed: int
    speeds: Speeds = field(default_factory=Speeds)
    failures: Failures = field(default_factory=Failures)
    pace_seconds: float = 1.0

    @cached_property
    def _dealt(self) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        rng = stream(self.seed, StreamPurpose.FLEET)
        shares = np.array([each.share for each in self.speeds.classes])
        # Dealt like cards: shares are met as nearly as whole devices allow.
        edges = np.cumsum(shares / shares.sum())
        places = (rng.permutation(self.devices) + 0.5) / self.devices
        classes = np.minimum(np.searchsorted(edges, places), len(shares) - 1).astype(np.int8)
        speeds = np.array([each.speed for each in self.speeds.classes])[classes]
        speeds = speeds * np.exp(self.speeds.spread * rng.standard_normal(self.devices))
        return classes, speeds.astype(np.float32)

    def require_width(self, width: int) -> None:
        """Raises AggregatorError for a class that trains more columns than a model has."""
        for each in self.speeds.classes:
            if each.k > width:
                raise AggregatorError(
                    f"--speeds: the class {each.name!r} trains {each.k} columns; the task's model "
                    f"has {width}"
                )

    def require_artifacts(self, names: Sequence[str]) -> None:
        """Raises AggregatorError for a class that trains none of these artifacts."""
        for each in self.speeds.classes:
            if each.artifact is not None and each.artifact not in names:
                raise AggregatorError(
                    f"--speeds: the class {each.name!r} trains the artifact {each.artifact!r}; the "
                    f"task has {', '.join(names)}"
                )

    def class_of(self, device: int) -> CapabilityClass:
        """The class of a device."""
        return self.speeds.classes[int(self._dealt[0][device])]

    def by_kind(self, devices: Sequence[int]) -> dict[str, int]:
        """How many of these devices are of which class or, where all are of one and differ in
        speed, of which quarter of the fleet by it; empty for devices that are all alike."""
        classes, speeds = self._dealt
        places = np.asarray(devices, dtype=np.int64)
        if len(self.speeds.classes) > 1:
            counts = np.bincount(classes[places], minlength=len(self.speeds.classes))
            names = [each.name for each in self.speeds.classes]
        elif self.speeds.spread:
            quarter = np.empty(self.devices, dtype=np.int64)
            quarter[np.argsort(speeds, kind="stable")] = np.arange(self.devices) * 4 // self.devices
            counts, names = np.bincount(quarter[places], minlength=4), list(_QUARTERS)
        else:
            return {}
        return dict(zip(names, counts.tolist(), strict=True))

    def seconds(self, device: int, samples: int, part: float) -> float:
        """Virtual seconds that a device trains for, ``part`` (0 to 1) of the model."""
        return self.pace_seconds * samples / 1000 * part / float(self._dealt[1][device])

    def columns(self, device: int, samples: int, width: int, train_seconds: float) -> int:
        """k_i: the class's, or the largest that fits, as a device finds it; 1 where none does."""
        chosen = self.class_of(device).k
        if chosen:
            return chosen
        return max(
            1, min(width, int(self._share_that_fits(device, samples, train_seconds) * width))
        )

    def option(
        self,
        device: int,
        samples: int,
        names: Sequence[str],
        parts: Sequence[float],
        train_seconds: float,
    ) -> int:
        """Which of a task's artifacts a device trains: its class's, or the largest that fits."""
        chosen = self.class_of(device).artifact
        if chosen is not None:
            return list(names).index(chosen)
        limit = self._share_that_fits(device, samples, train_seconds)
        fitting = [place for place, part in enumerate(parts) if part <= limit]
        return fitting[-1] if fitting else 0

    def _share_that_fits(self, device: int, samples: int, train_seconds: float) -> float:
        whole = self.seconds(device, samples, 1.0)
        return Request(train_seconds).limit_seconds / whole if whole > 0 else 1.0

    def fates(self, number: int) -> NDArray[np.int8]:
        """What happens to each device in round ``number``, int8 [devices] of :class:`Fate`."""
        drawn = stream(self.seed, StreamPurpose.FATES, number).random(self.devices)
        chances = self.failures
        away = np.array([each.dropout for each in self.speeds.classes])[self._dealt[0]]
        edge = np.maximum(away, chances.dropout)
        fates = np.full(self.devices, int(Fate.ANSWERS), dtype=np.int8)
        fates[drawn < edge] = Fate.SILENT
        for fate, chance in (
            (Fate.CRASHES, chances.crash),
            (Fate.LATE, chances.late),
            (Fate.SPOILT, chances.nan),
        ):
            fates[(drawn >= edge) & (drawn < edge + chance)] = fate
            edge = edge + chance
        return fates
