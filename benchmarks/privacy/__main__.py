"""``python -m benchmarks.privacy``: which likes a curious aggregator reads out of updates."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

from benchmarks.harness import (
    StoredRuns,
    add_rows,
    add_run_options,
    data_folder,
    named,
    progress_line,
    seeds_of,
    suite_parser,
)
from benchmarks.privacy.execute import execute
from benchmarks.privacy.experiment import ROWS, Outcome, Run, run_of
from benchmarks.privacy.table import attack_table, joining_table
from benchmarks.recommendation.split import LeaveOneOut, load_split_of
from benchmarks.scatter.cost import open_step
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
    options = _parse(arguments)
    names = named(options.rows, [row.name for row in ROWS])
    rows = [row for row in ROWS if row.name in names]
    store = StoredRuns(options.results, "privacy", Outcome)
    runner = _Runner(options)
    outcomes: dict[str, dict[int, Outcome]] = {row.name: {} for row in rows}
    # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
    for seed, row in product(seeds_of(options), rows):
        run = run_of(row, seed, options.epochs)
        make = None if options.table_only else partial(runner.run, run, f"seed {seed}, {row.name}")
        outcome = store.found_or_made(run, make)
        if outcome is not None:
            outcomes[row.name][seed] = outcome
    print(f"\nML-100K, validation items, BPR {options.epochs} passes; precision / recall / AUC\n")
    print(attack_table(outcomes))
    print("\nthe first update sent by a device that joins the trained fleet\n")
    print(joining_table(outcomes))
    return 0


class _Runner:
    """Loads the data and the train graph once, when the first run needs them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._loaded: tuple[LeaveOneOut, FactorStep] | None = None

    def run(self, run: Run, label: str) -> Outcome:
        """Carry out one run, with its progress on standard error."""
        if self._loaded is None:
            root = data_folder(self._options.root, "ml-100k/leave_one_out")
            split = load_split_of(root, "ml-100k", "validation")
            self._loaded = (split, open_step(None))
        split, step = self._loaded
        with progress_line(label) as progress:
            return execute(run, split, step, progress)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser(
        "privacy",
        _DESCRIPTION,
        "rows:\n" + "\n".join(f"  {row.name:22} {row.shows}" for row in ROWS),
    )
    add_rows(parser)
    add_run_options(parser, seeds=3)
    parser.add_argument("--epochs", type=int, default=20, help="passes of BPR (20)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
