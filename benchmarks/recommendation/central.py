"""Recommenders that see everybody's data in one place, measured as a fleet's are: with settings
chosen on validation items, and stored under them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from benchmarks.harness import StoredRuns, data_folder
from benchmarks.recommendation.baselines import ease, ials, popularity
from benchmarks.recommendation.metrics import Floats, full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, SplitKind, load_split_of

Model = Literal["popularity", "EASE", "iALS"]

CANDIDATES: dict[Model, tuple[tuple[float, float], ...]] = {
    "popularity": ((0.0, 0.0),),
    "EASE": tuple(product((50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0), (0.0,))),
    "iALS": tuple(product((10.0, 30.0), (1.0, 4.0, 16.0))),
}
"""Penalties and alphas that are tried on validation items."""

_SEEDS: dict[Model, int] = {"popularity": 1, "EASE": 1, "iALS": 3}


@dataclass(frozen=True, slots=True)
class Run:
    """One model on one split; ``penalty`` is EASE's and iALS's, ``alpha`` and ``seed`` iALS's."""

    data: str
    split: SplitKind
    model: Model
    penalty: float = 0.0
    alpha: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality among the given negatives, and among all items that a user does not have."""

    hit_ratio: float
    ndcg: float
    full_hit_ratio: float
    full_ndcg: float


@dataclass(frozen=True, slots=True)
class Line:
    """A recommender's outcomes, a seed each; ``seeds`` is what a table says of their number."""

    name: str
    seeds: str
    outcomes: Sequence[Outcome]

    def mean(self, measure: str) -> float:
        """Of one of :class:`Outcome`'s measures."""
        return fmean(getattr(one, measure) for one in self.outcomes)


def central_lines(data: str, options: argparse.Namespace) -> tuple[list[Line], list[Line]]:
    """All that was tried on validation items, and on test items each model with the settings of
    the best NDCG@10 among all items there, the best first.

    ``options``: those of ``add_store_options``; what is not stored is run, or left out.
    """
    tried, tested = [], []
    for model, settings in CANDIDATES.items():
        runs = [Run(data, "validation", model, *each) for each in settings]
        found = [(run, line) for run in runs if (line := _line(run, options)).outcomes]
        tried += [line for _, line in found]
        if found:
            best, _ = max(found, key=lambda one: one[1].mean("full_ndcg"))
            tested.append(_line(replace(best, split="test"), options))
    tested = [line for line in tested if line.outcomes]
    return tried, sorted(tested, key=lambda line: line.mean("full_ndcg"), reverse=True)


def _line(run: Run, options: argparse.Namespace) -> Line:
    """Of the run's settings, over the seeds of its model."""
    stored = StoredRuns[Run, Outcome](options.results, "recommendation", Outcome)
    runs = [replace(run, seed=seed) for seed in range(_SEEDS[run.model])]
    found = [
        stored.found_or_made(
            one, None if options.table_only else partial(measured, one, options.root)
        )
        for one in runs
    ]
    outcomes = [one for one in found if one is not None]
    settings = (("penalty", run.penalty), ("alpha", run.alpha))
    told = (f"{name} {value:g}" for name, value in settings if value)
    # Nothing is drawn for the others: the split and the negatives are given.
    seeds = str(len(outcomes)) if len(runs) > 1 else ""
    return Line(", ".join((run.model, *told)), seeds, outcomes)


def measured(run: Run, root: Path | None) -> Outcome:
    """Load the run's split and evaluate its model there."""
    folder = data_folder(root, "ml-100k/leave_one_out and ml-1m/ncf")
    split = _split(folder, run.data, run.split)
    users, items = _vectors(run, split)
    sampled = quality(sampled_ranks(users, items, split))
    full = quality(full_ranks(users, items, split))
    return Outcome(sampled.hit_ratio, sampled.ndcg, full.hit_ratio, full.ndcg)


_split = cache(load_split_of)


def _vectors(run: Run, split: LeaveOneOut) -> tuple[Floats, Floats]:
    if run.model == "popularity":
        return popularity(split)
    if run.model == "EASE":
        return ease(split, run.penalty)
    return ials(split, run.penalty, run.alpha, np.random.default_rng(run.seed))
