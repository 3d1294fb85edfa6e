"""``python -m benchmarks.scatter``: quality and cost of scatter aggregation on MovieLens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

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
from benchmarks.recommendation.central import central_lines
from benchmarks.recommendation.split import DATA_SETS, LeaveOneOut, load_split_of
from benchmarks.scatter.cost import open_step, published_bytes
from benchmarks.scatter.execute import execute
from benchmarks.scatter.experiment import Experiment, Outcome
from benchmarks.scatter.presets import ROWS
from benchmarks.scatter.table import by_class_table, curve_table, quality_table
from device_sdk.methods.scatter.factor_step import FactorStep

_DESCRIPTION = """\
Trains virtual fleets on MovieLens with the real learners and method, one device a user, updates in
int8, and prints HR@10 and NDCG@10 among all items and among 99 given negatives, beside recommenders
that see everybody's data in one place; and what a device sends and computes. Least squares has
untouched defaults. Every finished run is stored under its settings, so a benchmark that was stopped
continues where it was, and --table-only prints what is there.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.scatter --data ml-100k --seeds 3
  python -m benchmarks.scatter --data ml-1m --rows "least squares;unequal" --seeds 1
  python -m benchmarks.scatter --split validation --data ml-100k --seeds 2   (to choose settings)
  python -m benchmarks.scatter --data ml-100k --seeds 1 --curve    (quality on the way)
  python -m benchmarks.scatter.full_round                  (time and memory of 6,040 devices)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    names = named(options.rows, [row.name for row in ROWS])
    rows = [row for row in ROWS if row.name in names]
    store = StoredRuns(options.results, "scatter", Outcome)
    for data in DATA_SETS if options.data == "all" else (options.data,):
        seeds = seeds_of(options, 10 if data == "ml-100k" else 3)
        outcomes: dict[str, dict[int, Outcome]] = {row.name: {} for row in rows}
        runner = _Runner(options, data)
        # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
        for seed, row in product(seeds, rows):
            experiment = row.experiment(data, options.split, seed)
            if options.epochs:
                experiment = replace(experiment, epochs=options.epochs)
            label = f"{data}, seed {seed}, {row.name}"
            run = None if options.table_only else partial(runner.run, experiment, label)
            outcome = store.found_or_made(experiment, run)
            if outcome is not None:
                outcomes[row.name][seed] = outcome
        _, central = central_lines(data, options)
        down = {row.name: published_bytes(row.experiment(data, "test", 0)) for row in rows}
        print(f"\n{data}, {options.split} items\n")
        print(quality_table(outcomes, central if options.split == "test" else [], down))
        print()
        print(by_class_table(outcomes))
        if options.picture is not None:
            from benchmarks.scatter.picture import draw_bytes

            draw_bytes(options.picture, outcomes, central)
        if options.curve:
            print()
            print(curve_table(outcomes))
    return 0


class _Runner:
    """Loads the data and the train graph once, when the first run needs them."""

    def __init__(self, options: argparse.Namespace, data: str) -> None:
        self._options = options
        self._data = data
        self._loaded: tuple[LeaveOneOut, FactorStep] | None = None

    def run(self, experiment: Experiment, label: str) -> Outcome:
        """Carry out one experiment, with its progress on standard error."""
        if self._loaded is None:
            root = _data_folder(self._options)
            split = load_split_of(root, self._data, self._options.split)
            self._loaded = (split, open_step(self._options.artifact))
        split, step = self._loaded
        with progress_line(label) as progress:
            return execute(experiment, split, step, progress)


def _data_folder(options: argparse.Namespace) -> Path:
    return data_folder(options.root, "ml-100k/leave_one_out and ml-1m/ncf")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser(
        "scatter",
        _DESCRIPTION,
        _EXAMPLES + "\nrows:\n" + "\n".join(f"  {r.name:27} {r.shows}" for r in ROWS),
    )
    parser.add_argument("--data", choices=(*DATA_SETS, "all"), default="all")
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    add_rows(parser)
    add_run_options(parser, seeds=None, said="10 and 3")
    parser.add_argument("--curve", action="store_true", help="print quality after each pass too")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw quality over bytes sent (of one --data)"
    )
    parser.add_argument(
        "--epochs", type=int, default=0, help="passes of every row, on validation items alone"
    )
    parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")
    options = parser.parse_args(arguments)
    if options.picture is not None and options.data == "all":
        parser.error("--picture draws one data set: add --data ml-100k or --data ml-1m")
    if options.epochs and options.split != "validation":
        parser.error("--epochs chooses passes, which test items must not: add --split validation")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
