"""``python -m benchmarks.distill``: attentive federated distillation on MovieLens 1M."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.datasets.click import Clicks, ClickSettings, data_root, load_clicks
from benchmarks.distill.execute import execute
from benchmarks.distill.experiment import Experiment, Outcome
from benchmarks.distill.fleet import ArtifactShelf, click_fields
from benchmarks.distill.presets import HARDER_ROWS, ROWS, Row
from benchmarks.distill.table import (
    cost_table,
    device_table,
    harder_table,
    quality_table,
    verdict,
)
from benchmarks.harness import (
    StoredRuns,
    add_rows,
    add_run_options,
    progress_line,
    seeds_of,
    suite_parser,
)

_DESCRIPTION = """\
Four devices with unequal shares of MovieLens 1M's users predict clicks and teach one another by
mean outputs (AFD, FD), or average their models (FedAvg). Tables 5 to 7 of the AFD paper, our
figures first, the paper's in brackets. The round with the least validation loss is reported; bytes
are those of sealed messages. Every finished run is stored under its settings, so a benchmark that
was stopped continues where it was. A run takes one to three minutes of one core."""
_EXAMPLES = """\
examples:
  python -m benchmarks.distill                           (everything, three seeds)
  python -m benchmarks.distill --rows "AFD;FD" --seeds 1
  python -m benchmarks.distill --table-only              (print what is stored)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    names = [name.strip() for name in options.rows.split(";")] if options.rows else None
    rows = [row for row in ROWS if names is None or row.name in names]
    if names is not None and len(rows) != len(set(names)):
        known = "; ".join(row.name for row in ROWS)
        print(f"--rows: unknown name among {options.rows!r}; known are: {known}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tessera-distill-") as folder:
        try:
            outcomes = _outcomes(options, rows, _Runner(options.root, Path(folder)))
        except FileNotFoundError as error:
            print(f"{error}", file=sys.stderr)
            return 2
    _report(outcomes)
    return 0


def _outcomes(
    options: argparse.Namespace, rows: Sequence[Row], runner: _Runner
) -> dict[str, dict[int, Outcome]]:
    store = StoredRuns(options.results, "distill", Outcome)
    outcomes: dict[str, dict[int, Outcome]] = {row.name: {} for row in rows}
    # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
    for seed, row in product(seeds_of(options), rows):
        experiment = row.make(seed)
        run = partial(runner.run, experiment, f"seed {seed}, {row.name}")
        outcome = store.found_or_made(experiment, None if options.table_only else run)
        if outcome is not None:
            outcomes[row.name][seed] = outcome
    return outcomes


def _report(outcomes: dict[str, dict[int, Outcome]]) -> None:
    harder = {row.name for row in HARDER_ROWS}
    fleet = {name: found for name, found in outcomes.items() if name not in harder}
    print("\nAll devices' test samples; in brackets the paper's figure\n")
    print(quality_table(fleet))
    print("\nBy device\n")
    print(device_table(fleet))
    print("\nTime and bytes\n")
    print(cost_table(fleet))
    print("\nBeyond the paper\n")
    print(harder_table(outcomes))
    print()
    print(verdict(outcomes))


class _Runner:
    """Loads the data once, when the first run needs them; exports artifacts into ``folder``."""

    def __init__(self, root: Path | None, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._loaded: dict[ClickSettings, tuple[Clicks, ArtifactShelf]] = {}

    def run(self, experiment: Experiment, label: str) -> Outcome:
        """Carry out one experiment, with its progress on standard error."""
        if experiment.data not in self._loaded:
            clicks = load_clicks(self._root or data_root(), experiment.data)
            shelf = ArtifactShelf(self._folder, click_fields(clicks.sizes))
            self._loaded = {experiment.data: (clicks, shelf)}
        clicks, shelf = self._loaded[experiment.data]
        with progress_line(label) as progress:
            return execute(experiment, clicks, shelf, progress)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser(
        "distill",
        _DESCRIPTION,
        _EXAMPLES + "\nrows:\n" + "\n".join(f"  {r.name:24} {r.shows}" for r in ROWS),
    )
    add_rows(parser)
    add_run_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
