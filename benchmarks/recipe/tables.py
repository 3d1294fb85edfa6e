"""Small tables: a few rows a device, most of them of one class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from device_sdk.tables.text import open_table

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
_MEASURED = ("PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM", "hour")
_BOUNDS = (35.0, 75.0, 115.0, 150.0)
_SMOG = 115.0
_A_STATION = 300
"""Rows that are drawn of one."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Numbers ``x`` [n, columns] and classes ``label`` [n]."""

    x: Floats
    label: Labels

    def __getitem__(self, chosen: Any) -> Rows:
        return Rows(self.x[chosen], self.label[chosen])

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """As a batch names them."""
        return {"x": self.x, "label": self.label}


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """Each device's rows, and those that nobody trains on. ``scaled``: by the app; else the columns
    are as they were measured, and the model begins with batch norm."""

    devices: Sequence[Rows]
    test: Rows
    classes: int
    scaled: bool


def joined(parts: Sequence[Rows]) -> Rows:
    """All of them, one after the other."""
    labels = np.concatenate([each.label for each in parts])
    return Rows(np.concatenate([each.x for each in parts]), labels)


def _dealt(found: Any, devices: int, each: int, rng: np.random.Generator, *, scaled: bool) -> Dealt:
    """One of scikit-learn's tables, so many rows to each device; the others test."""
    order = rng.permutation(len(found.target))
    rows = Rows(found.data.astype(np.float32), found.target.astype(np.int64))[order]
    own = [rows[place * each : (place + 1) * each] for place in range(devices)]
    dealt = Dealt(own, rows[devices * each :], int(rows.label.max()) + 1, scaled)
    return _scaled(dealt) if scaled else dealt


def _scaled(dealt: Dealt) -> Dealt:
    trained = joined(dealt.devices).x
    mean, deviation = trained.mean(axis=0), trained.std(axis=0) + 1e-6

    def put(rows: Rows) -> Rows:
        return Rows((rows.x - mean) / deviation, rows.label)

    return Dealt([put(each) for each in dealt.devices], put(dealt.test), dealt.classes, True)


def cancer(root: Path, rng: np.random.Generator) -> Dealt:
    """Wisconsin's tumours: benign or not; 20 devices of 20 rows, as they were measured."""
    return _dealt(load_breast_cancer(), 20, 20, rng, scaled=False)


def eights(root: Path, rng: np.random.Generator) -> Dealt:
    """Whether a digit is an 8; 36 devices of 40 rows."""
    found = load_digits()
    found.target = (found.target == 8).astype(np.int64)
    return _dealt(found, 36, 40, rng, scaled=True)


def wine(root: Path, rng: np.random.Generator) -> Dealt:
    """Of which of three growers a wine is; 6 devices of 20 rows, as they were measured."""
    return _dealt(load_wine(), 6, 20, rng, scaled=False)


def pairs(root: Path, rng: np.random.Generator) -> Dealt:
    """Which digit it is, where each of 36 devices has but two of the ten; 40 rows each."""
    found = load_digits()
    dealt = _dealt(found, 36, 40, rng, scaled=True)
    rows = joined(dealt.devices)
    by_label = rows[np.argsort(rows.label, kind="stable")]
    shards = np.array_split(np.arange(len(by_label.label)), 72)
    places = rng.permutation(72).reshape(36, 2)
    own = [by_label[np.concatenate([shards[a], shards[b]])] for a, b in places]
    return Dealt(own, dealt.test, 10, True)


def smog(root: Path, rng: np.random.Generator) -> Dealt:
    """Whether an hour of Beijing's has PM2.5 above 115; 3 devices a station, 40 rows, raw."""
    return _air(root, rng, lambda level: (level > _SMOG).astype(np.int64), 2, scaled=False)


def levels(root: Path, rng: np.random.Generator) -> Dealt:
    """The level of PM2.5, of five; 3 devices a station, 40 rows."""
    of: Callable[[Floats], Labels] = lambda level: np.digitize(level, _BOUNDS, right=True)  # noqa: E731
    return _air(root, rng, of, 5, scaled=True)


def _air(
    root: Path,
    rng: np.random.Generator,
    label: Callable[[Floats], Labels],
    classes: int,
    *,
    scaled: bool,
) -> Dealt:
    own: list[Rows] = []
    test: list[Rows] = []
    for file in sorted((root / "beijing-air").glob("*.csv.gz")):
        numbers = _station(file)
        drawn = numbers[rng.permutation(len(numbers))[:_A_STATION]]
        rows = Rows(drawn[:, 1:], label(drawn[:, 0]).astype(np.int64))
        own += [rows[place * 40 : (place + 1) * 40] for place in range(3)]
        test.append(rows[120:])
    if not own:
        raise FileNotFoundError(f"no {root / 'beijing-air'}")
    dealt = Dealt(own, joined(test), classes, scaled)
    return _scaled(dealt) if scaled else dealt


def _station(file: Path) -> Floats:
    """[hours, 12]: PM2.5 and what was measured beside it, where all of it was."""
    rows = open_table(file).rows()
    header = next(rows)
    places = [header.index(name) for name in ("PM2.5", *_MEASURED)]
    chosen = ([row[place] for place in places] for row in rows)
    return np.asarray([[float(n) for n in row] for row in chosen if "NA" not in row], np.float32)


TABLES: Mapping[str, Callable[[Path, np.random.Generator], Dealt]] = {
    "tumours, raw": cancer,
    "wines, raw": wine,
    "eights": eights,
    "smog, raw": smog,
    "levels of PM2.5": levels,
    "digits, two a device": pairs,
}
