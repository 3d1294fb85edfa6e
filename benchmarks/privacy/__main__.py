"""``python -m benchmarks.privacy``: which likes a curious aggregator reads out of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from statistics import fmean

from benchmarks.harness import (
    BySeed,
    Cell,
    StoredRuns,
    add_rows,
    add_run_options,
    against,
    chosen,
    data_folder,
    finished,
    markdown_table,
    mean_of,
    seeds_of,
    suite_parser,
    table_of,
)
from benchmarks.privacy.attack import Judgement
from benchmarks.privacy.execute import execute
from benchmarks.privacy.experiment import DEFAULT, ROWS, Outcome, Run, run_of
from benchmarks.recommendation.split import LeaveOneOut, load_split_of
from benchmarks.scatter.execute import open_step
from device_sdk.methods.scatter.factor_step import FactorStep

_DESCRIPTION = """\
Trains fleets on ML-100K with the real learners, method and train graph, and lets the aggregator,
which sees updates in int8, guess from each device's updates what its users like: by a cut at the
size of the rows, and by a model that was trained on other devices whose likes are known. Prints
precision, recall and AUC (of true items against pseudo-items; 0.5: cannot tell) of both, over 200
devices (24 of those with 20 users), beside HR@10 on validation items. Every finished run is stored
under its settings, so a benchmark that was stopped continues where it was, and --table-only prints
what is there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    told = "\n".join(f"  {row.name:22} {row.shows}" for row in ROWS)
    parser = suite_parser("privacy", _DESCRIPTION, f"rows:\n{told}")
    add_rows(parser)
    add_run_options(parser, seeds=3)
    parser.add_argument("--epochs", type=int, default=20, help="passes of BPR (20)")
    options = parser.parse_args(arguments)

    @cache
    def loaded() -> tuple[LeaveOneOut, FactorStep]:
        root = data_folder(options.root, "ml-100k/leave_one_out")
        return load_split_of(root, "ml-100k", "validation"), open_step(None)

    def run(one: Run, progress: Callable[[str], None]) -> Outcome:
        return execute(one, *loaded(), progress)

    asked = (
        (row.name, seed, run_of(row, seed, options.epochs))
        for seed, row in product(seeds_of(options), chosen(options.rows, ROWS))
    )
    store = StoredRuns[Run, Outcome](options.results, "privacy", Outcome)
    outcomes = finished(asked, store, None if options.table_only else run)
    print(f"\nML-100K, validation items, BPR {options.epochs} passes; precision / recall / AUC\n")
    print(attack_table(outcomes))
    print("\nthe first update sent by a device that joins the trained fleet\n")
    print(joining_table(outcomes))
    return 0


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


if __name__ == "__main__":
    raise SystemExit(main())
