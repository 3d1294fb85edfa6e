"""``python -m benchmarks.privacy``: which likes a curious aggregator reads out of updates."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from benchmarks.harness import (
    BySeed,
    Cell,
    Row,
    Suite,
    against,
    data_folder,
    markdown_table,
    mean_of,
    table_of,
)
from benchmarks.privacy.attack import Judgement
from benchmarks.privacy.experiment import DEFAULT, ROWS, Outcome, Run, execute
from benchmarks.recommendation.split import load_split_of
from benchmarks.scatter.experiment import open_step


class PrivacySuite(Suite[Run, Outcome]):
    name = "privacy"
    description = """\
Trains fleets on ML-100K with the real learners, method and train graph, and lets the aggregator,
which sees updates in int8, guess from each device's updates what its users like: by a cut at the
size of the rows, and by a model that was trained on other devices whose likes are known. Prints
precision, recall and AUC (of true items against pseudo-items; 0.5: cannot tell) of both, over 200
devices (24 of those with 20 users), beside HR@10 on validation items. Every finished run is stored
under its settings, so a benchmark that was stopped continues where it was, and --table-only prints
what is there.
"""
    outcome = Outcome
    rows = ROWS
    tables: Mapping[str, str] = {
        "": "ML-100K, validation items, BPR {epochs} passes; precision / recall / AUC"
    }

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--epochs", type=int, default=20, help="passes of BPR (20)")

    def run_of(self, row: Row[Run], seed: int, options: argparse.Namespace) -> Run | None:
        return row.make(seed, options.epochs)

    def execute(
        self, run: Run, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "ml-100k/leave_one_out")
        split = load_split_of(root, "ml-100k", "validation")
        return execute(run, split, open_step(None), progress)

    def shown(self, table: str, outcomes: Outcomes, options: argparse.Namespace) -> Iterator[str]:
        yield attack_table(outcomes)
        yield "the first update sent by a device that joins the trained fleet"
        yield joining_table(outcomes)


# The tables.

Outcomes = Mapping[str, BySeed[Outcome]]


def attack_table(outcomes: Outcomes) -> str:
    """Accuracy beside precision / recall / AUC of each attack, means over seeds by row's name."""
    columns: Mapping[str, Cell[Outcome]] = {
        "HR@10": mean_of(lambda one: one.hit_ratio),
        f"against {DEFAULT!r}": against(outcomes.get(DEFAULT, {}), lambda one: one.hit_ratio),
        "rows up": mean_of(lambda one: one.update_rows, ".0f"),
        "first update, by size": lambda name, found: _judged(lambda one: one.first_by_size, found),
        "first update, learned": lambda name, found: _judged(lambda one: one.first, found),
        "last update, learned": lambda name, found: _judged(lambda one: one.last, found),
        "all updates, learned": lambda name, found: _judged(lambda one: one.every, found),
    }
    return table_of(outcomes, columns)


def joining_table(outcomes: Outcomes) -> str:
    """The attacks on devices that join a trained fleet, by the rounds that they trained before."""
    lines = []
    for name, found in outcomes.items():
        rounds = next(iter(found.values())).joined if found else {}
        for silent in rounds:
            lines.append(
                (
                    name,
                    silent,
                    _judged(lambda one, key=silent: one.joined_by_size[key], found),  # type: ignore[misc]
                    _judged(lambda one, key=silent: one.joined[key], found),  # type: ignore[misc]
                )
            )
    return markdown_table(lines, ("devices", "rounds in silence", "by size", "learned"))


def _judged(part: Callable[[Outcome], Judgement], found: BySeed[Outcome]) -> str:
    judged = [part(one) for one in found.values()]
    parts = [[one.precision for one in judged], [one.recall for one in judged]]
    ranked = [one.auc for one in judged if one.auc is not None]
    return " / ".join(f"{fmean(part):.3f}" for part in (*parts, ranked) if part)


main = PrivacySuite().main

if __name__ == "__main__":
    raise SystemExit(main())
