"""``python -m benchmarks.recommendation``: MovieLens by who sees everybody's data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from aggregator.simulate.intervals import interval, spread
from benchmarks.harness import (
    StoredRuns,
    add_store_options,
    data_folder,
    key_of,
    markdown_table,
    suite_parser,
)
from benchmarks.recommendation.baselines import ease, ials, popularity
from benchmarks.recommendation.metrics import Floats, full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import DATA_SETS, LeaveOneOut, SplitKind, load_split_of
from benchmarks.scatter import experiment as fleets
from benchmarks.scatter.presets import BASELINE, DEVICES, ROWS, preset

Model = Literal["popularity", "EASE", "iALS"]

CANDIDATES: dict[Model, tuple[tuple[float, float], ...]] = {
    "popularity": ((0.0, 0.0),),
    "EASE": tuple(product((50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0), (0.0,))),
    "iALS": tuple(product((10.0, 30.0), (1.0, 4.0, 16.0))),
}
"""Penalties and alphas that are tried on validation items."""

_SEEDS: dict[Model, int] = {"popularity": 1, "EASE": 1, "iALS": 3}
_FLEETS = (BASELINE, "unequal", "unequal, patent", "all at smallest k")
_FLEET_SEEDS = 10

_DESCRIPTION = """\
HR@10 and NDCG@10 of three recommenders that see everybody's data in one place: popularity, EASE
(Steck 2019, a closed form) and iALS (Hu et al. 2008, K = 64, 15 sweeps, 3 seeds), with the split,
the 99 given negatives and the metrics that benchmarks.scatter reports; beside its stored fleets,
the best first. Settings are those with the best NDCG@10 on validation items; the test items are
looked at with these alone. Every figure is stored under its settings; --table-only prints what is
there.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One model on one split; ``penalty`` is EASE's and iALS's, ``alpha`` and ``seed`` iALS's."""

    data: str
    split: SplitKind
    model: Model
    penalty: float = 0.0
    alpha: float = 0.0
    seed: int = 0

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        return key_of(asdict(self))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality among the given negatives, and among all items that a user does not have."""

    hit_ratio: float
    ndcg: float
    full_hit_ratio: float
    full_ndcg: float


@dataclass(frozen=True, slots=True)
class _Line:
    """A recommender's outcomes, a seed each; ``seeds`` is what the table says of their number."""

    name: str
    seeds: str
    outcomes: Sequence[Outcome]

    def mean(self, measure: str) -> float:
        return fmean(getattr(one, measure) for one in self.outcomes)

    @property
    def cells(self) -> tuple[str, ...]:
        """As ``_HEADERS`` names them."""
        cells = [self.name, self.seeds]
        for measure in fields(Outcome):
            values = [getattr(one, measure.name) for one in self.outcomes]
            cells.append(_spread(values))
            if not measure.name.startswith("full"):
                cells.append(_interval(values))
        return tuple(cells)


_HEADERS = (
    *("", "seeds", "HR@10", "95 % interval", "NDCG@10", "95 % interval"),
    *("HR@10 full", "NDCG@10 full"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    for data in DATA_SETS if options.data == "all" else (options.data,):
        _report(data, options)
    return 0


def _report(data: str, options: argparse.Namespace) -> None:
    tried = []
    tested = [_fleet(data, row, options) for row in _FLEETS]
    for model, settings in CANDIDATES.items():
        runs = [Run(data, "validation", model, *each) for each in settings]
        found = [(run, line) for run in runs if (line := _central(run, options)).outcomes]
        tried += [line for _, line in found]
        if found:
            best, _ = max(found, key=lambda one: one[1].mean("ndcg"))
            tested.append(_central(replace(best, split="test"), options))
    tested = [line for line in tested if line.outcomes]
    tested.sort(key=lambda line: line.mean("hit_ratio"), reverse=True)
    for items, lines in (("validation", tried), ("test", tested)):
        print(f"\n{data}, {items} items\n")
        print(markdown_table([line.cells for line in lines], _HEADERS))
    if tested:
        users, first = DEVICES[data], tested[0].mean("hit_ratio")
        error = math.sqrt(first * (1 - first) / users)
        print(f"\nStandard error of HR@10 over the {users} users, the same for all: {error:.3f}")


def _central(run: Run, options: argparse.Namespace) -> _Line:
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
    return _Line(", ".join((run.model, *told)), seeds, outcomes)


def _fleet(data: str, name: str, options: argparse.Namespace) -> _Line:
    """Of benchmarks.scatter's row of that name, as far as it is stored."""
    stored = StoredRuns[fleets.Experiment, fleets.Outcome](
        options.results, "scatter", fleets.Outcome
    )
    (row,) = (row for row in ROWS if row.name == name)
    found = [stored.load(row.change(preset(data, "test", seed))) for seed in range(_FLEET_SEEDS)]
    ends = [one.last for one in found if one is not None]
    outcomes = [Outcome(e.hit_ratio, e.ndcg, e.full_hit_ratio, e.full_ndcg) for e in ends]
    return _Line(f"fleet, {name}", str(len(outcomes)), outcomes)


def _spread(values: Sequence[float]) -> str:
    found = spread(values)
    more = "" if math.isnan(found.deviation) else f" ± {found.deviation:.4f}"
    return f"{found.mean:.4f}{more}"


def _interval(values: Sequence[float]) -> str:
    """Of the mean over seeds; blank for one value."""
    found = interval(values)
    if math.isnan(found.half_width):
        return ""
    return f"{found.mean - found.half_width:.4f} to {found.mean + found.half_width:.4f}"


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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser("recommendation", _DESCRIPTION, "")
    parser.add_argument("--data", choices=(*DATA_SETS, "all"), default="all")
    add_store_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
