"""``python -m benchmarks.recommendation``: what needs no training finds on MovieLens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.harness import (
    StoredRuns,
    add_store_options,
    data_folder,
    key_of,
    markdown_table,
    suite_parser,
)
from benchmarks.recommendation.baselines import ease, popularity
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import DATA_SETS, SplitKind, load_split_of

PENALTIES = (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
"""Of EASE, tried on validation items."""

_DESCRIPTION = """\
HR@10 and NDCG@10 of recommending by popularity and by EASE (Steck 2019, a closed form), with the
split, the 99 given negatives and the metrics that benchmarks.scatter reports. EASE's penalty is the
one with the best NDCG@10 on validation items; the test items are looked at once, with that one.
Every figure is stored under its settings; --table-only prints what is there.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One model on one split; ``penalty`` is EASE's, 0 for popularity."""

    data: str
    split: SplitKind
    model: Literal["popularity", "EASE"]
    penalty: float = 0.0

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    for data in DATA_SETS if options.data == "all" else (options.data,):
        _report(data, options)
    return 0


def _report(data: str, options: argparse.Namespace) -> None:
    stored = StoredRuns[Run, Outcome](options.results, "recommendation", Outcome)

    def found(run: Run) -> Outcome | None:
        make = None if options.table_only else partial(measured, run, options.root)
        return stored.found_or_made(run, make)

    tried = {each: found(Run(data, "validation", "EASE", each)) for each in PENALTIES}
    known = {each: one for each, one in tried.items() if one is not None}
    print(f"\n{data}, validation items\n")
    plain = found(Run(data, "validation", "popularity"))
    lines = [_line("popularity", plain), *(_line(f"EASE, {e:g}", one) for e, one in known.items())]
    print(markdown_table([line for line in lines if line], ("", *_HEADERS)))
    print(f"\n{data}, test items\n")
    lines = [_line("popularity", found(Run(data, "test", "popularity")))]
    if known:
        best = max(known, key=lambda each: known[each].ndcg)
        lines.append(_line(f"EASE, {best:g}", found(Run(data, "test", "EASE", best))))
    print(markdown_table([line for line in lines if line], ("", *_HEADERS)))


_HEADERS = ("HR@10", "NDCG@10", "HR@10 full", "NDCG@10 full")


def _line(name: str, one: Outcome | None) -> tuple[str, ...]:
    """Empty where there is no outcome."""
    if one is None:
        return ()
    values = (one.hit_ratio, one.ndcg, one.full_hit_ratio, one.full_ndcg)
    return (name, *(f"{value:.4f}" for value in values))


def measured(run: Run, root: Path | None) -> Outcome:
    """Load the run's split and evaluate its model there."""
    split = load_split_of(data_folder(root, "ml-100k/leave_one_out"), run.data, run.split)
    users, items = popularity(split) if run.model == "popularity" else ease(split, run.penalty)
    sampled = quality(sampled_ranks(users, items, split))
    full = quality(full_ranks(users, items, split))
    return Outcome(sampled.hit_ratio, sampled.ndcg, full.hit_ratio, full.ndcg)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser("recommendation", _DESCRIPTION, "")
    parser.add_argument("--data", choices=(*DATA_SETS, "all"), default="ml-100k")
    add_store_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
