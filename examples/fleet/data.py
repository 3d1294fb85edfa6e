"""What the fleet learns from, and what it is tested on: leave-one-out by time, 99 negatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.recommendation.baselines import ease, ials, popularity
from benchmarks.recommendation.split import LeaveOneOut, load_split
from examples.datasets.movielens import Ratings, leave_one_out, ml_100k_or_synthetic
from examples.fleet.evaluate import FleetQuality

NEGATIVES = 99


@dataclass(frozen=True, eq=False)
class FleetData:
    """Rows of ``split`` are places in ``user_ids`` and ``item_ids``.

    ``origin`` says where the data came from, ``negatives`` where the negatives did.
    """

    name: str
    origin: str
    synthetic: bool
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    titles: tuple[str, ...]
    split: LeaveOneOut
    negatives: str

    @property
    def interactions(self) -> int:
        """Number of training interactions."""
        return sum(len(rows) for rows in self.split.train)

    def baselines(self, rng: np.random.Generator) -> dict[str, FleetQuality]:
        """Of recommenders that see everybody's data in one place; penalties as chosen for MovieLens
        100K on validation items (``benchmarks/recommendation``)."""
        split = self.split
        found = {
            "most popular items": popularity(split),
            "EASE": ease(split, 100.0),
            "iALS": ials(split, 10.0, 1.0, rng, min(64, split.items)),
        }
        return {name: FleetQuality.of(*vectors, split) for name, vectors in found.items()}


def load_fleet_data(
    root: Path, download_to: Path, *, download: Callable[[Path], None], rng: np.random.Generator
) -> FleetData:
    """MovieLens 100K from ``root``, else downloaded, else (offline) drawn at random."""
    ratings, origin = ml_100k_or_synthetic(root, download_to, download=download, rng=rng)
    published = root / "ml-100k" / "leave_one_out"
    if not ratings.synthetic and published.is_dir():
        split, negatives = load_split(root, "ml-100k"), "the published 99 a user"
    else:
        split = split_ratings(ratings, rng)
        negatives = f"{NEGATIVES} a user, drawn from what the user never touched"
    return FleetData(
        ratings.name,
        origin,
        ratings.synthetic,
        ratings.user_ids,
        ratings.item_ids,
        ratings.titles,
        split,
        negatives,
    )


def split_ratings(ratings: Ratings, rng: np.random.Generator) -> LeaveOneOut:
    """Each user's latest interaction held out, to be found among 99 that the user never touched.

    These negatives are for the test only. Training draws its own from everything outside the
    user's *training* items, the held-out one included: anything else would tell which one it is.
    """
    split = leave_one_out(ratings)
    items = len(ratings.item_ids)
    train, negatives = [], []
    for user, target in enumerate(split.test_item.tolist()):
        rows = split.train.items_of(user)
        outside = np.ones(items, np.bool_)
        outside[rows] = False
        outside[target] = False
        candidates = np.flatnonzero(outside)
        negatives.append(rng.choice(candidates, min(NEGATIVES, len(candidates)), replace=False))
        train.append(rows)
    return LeaveOneOut(items, tuple(train), split.test_item, tuple(negatives))
