"""``python -m benchmarks.mutual``: mutual learning against its baselines on four domains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.data_folder import data_folder
from benchmarks.datasets.pacs import PACS_DOMAINS
from benchmarks.mutual.artifacts import ArtifactCache
from benchmarks.mutual.domains import ANGLES
from benchmarks.mutual.execute import execute, load_domains
from benchmarks.mutual.experiment import Experiment
from benchmarks.mutual.outcome import Outcome, OutcomeStore
from benchmarks.mutual.presets import ROWS, TABLES, Row
from benchmarks.mutual.table import by_domain_table, mean_table, validation_table
from benchmarks.progress_line import progress_line

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "benchmarks" / "results" / "mutual"
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
    names = [name.strip() for name in options.rows.split(";")] if options.rows else None
    tables = list(TABLES) if options.table == "all" else [options.table]
    rows = [r for r in ROWS if r.table in tables and (names is None or r.name in names)]
    if not rows:
        known = "; ".join(row.name for row in ROWS if row.table in tables)
        print(f"--rows: none of {options.rows!r} is known; known are: {known}", file=sys.stderr)
        return 2
    runner = _Runner(options)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    outcomes: dict[str, dict[str, dict[int, Outcome]]] = {table: {} for table in tables}
    # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
    for seed in seeds:
        for row in rows:
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
        self._store = OutcomeStore(options.results)
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
        found = self._store.load(experiment)
        if found is None and not self._options.table_only:
            found = self._run(experiment, f"{row.table}, seed {seed}, {row.name}")
            self._store.save(experiment, found)
        return found

    def _run(self, experiment: Experiment, label: str) -> Outcome:
        with progress_line(label) as progress:
            domains = load_domains(experiment, data_folder(self._options.root, _HOLDS))
            return execute(experiment, domains, self._artifacts, progress)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    tables = "\n".join(f"  {name:14} {shows}" for name, shows in TABLES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutual",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\ntables:\n{tables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all")
    parser.add_argument("--rows", help="names of rows, separated by semicolons (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--validation", action="store_true", help="show validation accuracy alone")
    parser.add_argument("--root", type=Path, help="data folder (default: TESSERA_DATA)")
    parser.add_argument("--artifacts", type=Path, default=_ARTIFACTS, help="where exports are kept")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="where runs are stored")
    parser.add_argument("--table-only", action="store_true", help="print stored runs, run none")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
