"""``python -m benchmarks.mutual``: mutual learning against its baselines on four domains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.datasets.pacs import PACS_DOMAINS
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
from benchmarks.mutual.domains import ANGLES
from benchmarks.mutual.execute import execute, load_domains
from benchmarks.mutual.experiment import Experiment, Outcome
from benchmarks.mutual.fleets import ArtifactCache
from benchmarks.mutual.presets import ROWS, TABLES, Row
from benchmarks.mutual.table import by_domain_table, mean_table, validation_table

_ROOT = Path(__file__).resolve().parents[2]
_ARTIFACTS = _ROOT / "out" / "artifacts"
_HOLDS = "mnist and pacs64"

_DESCRIPTION = """\
Four devices, four domains: mutual learning (MAFML), independent training (IND), training on the
pooled public samples (AGG), FedMD and FedAvg, with the real learners, methods, train graphs and
wire encodings. ACC is the mean accuracy of a device's model on all domains' test samples, BWT on
its own, FWT on the others'; validation samples pick the round. Every finished run is stored under
its settings, so a benchmark that was stopped continues where it was, and --table-only prints what
is there.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.mutual --table independent --seeds 1
  python -m benchmarks.mutual --table variants --rows "MAFML;top 3 classes"
  python -m benchmarks.mutual --table pacs64 --seeds 1 --validation     (to choose settings)
  python -m benchmarks.mutual --table-only
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    tables = list(TABLES) if options.table == "all" else [options.table]
    rows = [row for row in ROWS if row.table in tables]
    names = named(options.rows, [row.name for row in rows])
    rows = [row for row in rows if row.name in names]
    runner = _Runner(options)
    outcomes: dict[str, dict[str, dict[int, Outcome]]] = {table: {} for table in tables}
    # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
    for seed, row in product(seeds_of(options), rows):
        outcome = runner.outcome(row, seed)
        if outcome is not None:
            outcomes[row.table].setdefault(row.name, {})[seed] = outcome
    for table in tables:
        shown = [row for row in rows if row.table == table]
        if not outcomes[table]:
            continue
        print(f"\n{TABLES[table]}\n")
        if options.validation:
            print(validation_table(shown, outcomes[table]))
            continue
        print(mean_table(shown, outcomes[table]))
        print()
        domains = PACS_DOMAINS if table == "pacs64" else [f"M{angle}" for angle in ANGLES]
        print(by_domain_table(shown, outcomes[table], domains))
    return 0


class _Runner:
    """Finds a row's outcome in the store, or carries the experiment out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._store = StoredRuns(options.results, "mutual", Outcome)
        self._artifacts = ArtifactCache(options.artifacts)

    def outcome(self, row: Row, seed: int) -> Outcome | None:
        """None where nothing is stored and nothing may be run."""
        experiment = row.make(seed)
        if row.equal_bytes:
            other = next(
                one for one in ROWS if (one.table, one.name) == (row.table, row.equal_bytes)
            )
            budget = self.outcome(other, seed)
            if budget is None:
                return None
            experiment = replace(experiment, most_bytes=round(budget.bytes))
        label = f"{row.table}, seed {seed}, {row.name}"
        run = None if self._options.table_only else partial(self._run, experiment, label)
        return self._store.found_or_made(experiment, run)

    def _run(self, experiment: Experiment, label: str) -> Outcome:
        with progress_line(label) as progress:
            domains = load_domains(experiment, data_folder(self._options.root, _HOLDS))
            return execute(experiment, domains, self._artifacts, progress)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    tables = "\n".join(f"  {name:14} {shows}" for name, shows in TABLES.items())
    parser = suite_parser("mutual", _DESCRIPTION, f"{_EXAMPLES}\ntables:\n{tables}")
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all")
    add_rows(parser)
    add_run_options(parser)
    parser.add_argument("--validation", action="store_true", help="show validation accuracy alone")
    parser.add_argument("--artifacts", type=Path, default=_ARTIFACTS, help="where exports are kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
