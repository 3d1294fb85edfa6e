"""Fleets that no setting of any method was chosen on: what ships is tried there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from benchmarks.datasets.pictures import PACS_DOMAINS, load_pacs64
from benchmarks.datasets.vmnist import read_pictures

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``x`` float32 [n, features] in 0 to 1, or [n, 3, 32, 32]; classes ``y`` int64 [n]."""

    x: Floats
    y: Labels

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> Rows:
        return Rows(self.x[rows], self.y[rows])


@dataclass(frozen=True, slots=True, eq=False)
class UntouchedDevice:
    """One device; no row is on two devices or in two parts."""

    name: str
    train: Rows
    validation: Rows
    test: Rows


Devices = list[UntouchedDevice]
# Samples of a device to train on, to choose the round by, and to test with.
_PICTURES = (100, 100, 200)
_SKEWED = (200, 100, 100)
_PACS = (120, 60, 60)
_TABLE = (50, 20, 25)


def _skewed(root: Path, rng: np.random.Generator, alpha: float, devices: int) -> Devices:
    """Fashion-MNIST; each device draws its classes by shares from Dirichlet(alpha)."""
    found = _both(root, "fashion-mnist")
    pools = {
        part: [rng.permutation(np.flatnonzero(rows.y == label)).tolist() for label in range(10)]
        for part, rows in found.items()
    }

    def drawn(part: str, count: int, shares: NDArray[np.float64]) -> Rows:
        wanted = rng.multinomial(count, shares)
        chosen = [pool.pop() for pool, n in zip(pools[part], wanted, strict=True) for _ in range(n)]
        return found[part][rng.permutation(np.asarray(chosen))]

    fleet = []
    for number in range(1, devices + 1):
        shares = rng.dirichlet(np.full(10, alpha))
        train, validation, test = _SKEWED
        known, unseen = (
            Rows(_flat(rows.x), rows.y)
            for rows in (drawn("train", train + validation, shares), drawn("t10k", test, shares))
        )
        parts = known[:train], known[train:], unseen
        fleet.append(UntouchedDevice(f"device.{number}", *parts))
    return fleet


def _turned(root: Path, rng: np.random.Generator, turns: int, each: int) -> Devices:
    """MNIST, ``each`` devices for every quarter turn of the first ``turns``."""
    whole = _both(root, "mnist")
    train, validation, test = _PICTURES
    own = iter(_dealt(whole["train"], rng, train + validation, turns * each))
    others = iter(_dealt(whole["t10k"], rng, test, turns * each))
    fleet = []
    for turn in range(turns):
        for number in range(1, each + 1):
            known, unseen = (
                Rows(_flat(np.rot90(rows.x, turn, axes=(1, 2))), rows.y)
                for rows in (next(own), next(others))
            )
            name = f"turned-{90 * turn}.{number}"
            fleet.append(UntouchedDevice(name, known[:train], known[train:], unseen))
    return fleet


def _pacs(root: Path, rng: np.random.Generator, each: int) -> Devices:
    """PACS at 32 x 32, ``each`` devices for every domain."""
    fleet = []
    for domain in PACS_DOMAINS:
        images = load_pacs64(root, domain)
        small = images.x.reshape(-1, 3, 32, 2, 32, 2).mean(axis=(3, 5), dtype=np.float32) / 255
        fleet += _parted(domain, Rows(small, images.y.astype(np.int64)), rng, _PACS, each)
    return fleet


def _relabelled(root: Path, rng: np.random.Generator, groups: int, each: int) -> Devices:
    """scikit-learn's table of digits; every made group calls them by other names."""
    del root
    table = load_digits()
    whole = Rows((table.data / 16).astype(np.float32), table.target.astype(np.int64))
    dealt = _dealt(whole, rng, len(whole.y) // groups, groups)
    fleet = []
    for group, rows in enumerate(dealt):
        called = Rows(rows.x, rng.permutation(10)[rows.y] if group else rows.y)
        fleet += _parted(f"group-{group}", called, rng, _TABLE, each)
    return fleet


def _dealt(whole: Rows, rng: np.random.Generator, count: int, devices: int) -> list[Rows]:
    """``count`` rows for each device."""
    order = rng.permutation(len(whole.y))[: count * devices]
    return [whole[rows] for rows in np.split(order, devices)]


def _parted(
    group: str, rows: Rows, rng: np.random.Generator, sizes: tuple[int, int, int], each: int
) -> Devices:
    train, _, test = sizes
    return [
        UntouchedDevice(f"{group}.{number}", one[:train], one[train:-test], one[-test:])
        for number, one in enumerate(_dealt(rows, rng, sum(sizes), each), 1)
    ]


@lru_cache(maxsize=2)
def _both(root: Path, name: str) -> Mapping[str, Rows]:
    """A set's pictures at 14 x 14, by part."""
    parts = {}
    for part in ("train", "t10k"):
        x, y = read_pictures(root / name, part)
        parts[part] = Rows(x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)), y)
    return parts


def _flat(x: Floats) -> Floats:
    return x.reshape(len(x), -1).astype(np.float32)


UNTOUCHED: Mapping[str, Callable[[Path, np.random.Generator], Devices]] = {
    "skewed-0.1": partial(_skewed, alpha=0.1, devices=20),
    "skewed-0.3": partial(_skewed, alpha=0.3, devices=40),
    "turned": partial(_turned, turns=4, each=5),
    "pacs": partial(_pacs, each=3),
    "relabelled": partial(_relabelled, groups=3, each=5),
    "alike": partial(_turned, turns=1, each=20),
    "alike-a-quarter": partial(_turned, turns=1, each=20),
}
"""Of a folder of data sets and a generator. Raises FileNotFoundError where a set is missing."""
TURNS: Mapping[str, int] = {"alike-a-quarter": 4}
"""After how many rounds each device took part once, where not all take part in every round."""
