"""``python -m benchmarks.attention``: attention-based aggregation against its baselines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from benchmarks.attention.execute import execute
from benchmarks.attention.experiment import Experiment, Outcome
from benchmarks.attention.pictures import draw_joining, draw_listening
from benchmarks.attention.rows import BEST, ROWS, TABLES, Row
from benchmarks.attention.table import (
    BySeed,
    joining_table,
    known_table,
    main_caption,
    main_table,
    validation_table,
)
from benchmarks.harness import (
    StoredRuns,
    add_rows,
    add_run_options,
    data_folder,
    progress_line,
    seeds_of,
    suite_parser,
)

_ROOT = Path(__file__).resolve().parents[2]
_ARTIFACTS = _ROOT / "out" / "artifacts" / "attention"
_HOLDS = "mnist, fashion-mnist and beijing-air"

_DESCRIPTION = """\
Personalised federated learning with the real learners, methods and train graphs: FedAMN, its
layers one by one, and the baselines, on V-MNIST (18 devices, a convolutional network of 22,218
parameters) and Beijing air quality (12 stations, a GRU of 32). 20 rounds of 30 steps; validation
data picks the round that is reported. Every finished run is stored under its settings, so a
benchmark that was stopped continues where it was, and --table-only prints what is there. A run
takes about half a minute of one core.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.attention --table vmnist --seeds 1
  python -m benchmarks.attention --table air --rows "FedAvg;FedAMN"
  python -m benchmarks.attention --validation --table air --seeds 1      (to choose settings)
  python -m benchmarks.attention --table-only
  python -m benchmarks.attention --table-only --pictures out/pictures   (figures 5 and 6)
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
    store = StoredRuns(options.results, "attention", Outcome)
    outcomes: dict[str, dict[str, dict[int, Outcome]]] = {table: {} for table in tables}
    # Seeds outside, rows inside: what is stopped early has all rows on the first seeds.
    for seed, row in product(seeds_of(options), rows):
        outcome = _outcome(row, seed, store, options)
        if outcome is not None:
            outcomes[row.table].setdefault(row.name, {})[seed] = outcome
    for table in tables:
        if not outcomes[table]:
            continue
        print(f"\n{TABLES[table]}\n")
        if options.validation:
            print(validation_table(outcomes[table]))
        elif table == "joining":
            print(joining_table(outcomes[table]))
        elif table == "known":
            print(known_table(outcomes[table]))
        else:
            print(main_table(outcomes[table]))
            print(f"\n{main_caption(rows[0].make(0).every)}")
    if options.pictures is not None:
        _draw(options.pictures, outcomes)
    return 0


def _draw(folder: Path, outcomes: Mapping[str, Mapping[str, BySeed]]) -> None:
    """Figure 5 of the first seed that has it, figure 6 of all; says what cannot be drawn."""
    for table in (name for name in ("vmnist", "air") if name in outcomes):
        found = outcomes[table].get(BEST, {})
        if found:
            seed = min(found)
            path = draw_listening(folder / f"attention-{table}.png", table, found[seed])
            print(f"\npicture: {path} ({BEST}, seed {seed})")
        else:
            print(f"no picture of {table}: no run of {BEST} is stored", file=sys.stderr)
    if outcomes.get("joining"):
        print(f"\npicture: {draw_joining(folder / 'joining.png', outcomes['joining'])}")
    elif "joining" in outcomes:
        print("no picture of joining: no run is stored", file=sys.stderr)


def _outcome(
    row: Row, seed: int, store: StoredRuns[Experiment, Outcome], options: argparse.Namespace
) -> Outcome | None:
    experiment = row.make(seed)

    def run() -> Outcome:
        with progress_line(f"{row.table}, seed {seed}, {row.name}") as progress:
            root = data_folder(options.root, _HOLDS)
            return execute(experiment, root, options.artifacts, progress)

    return store.found_or_made(experiment, None if options.table_only else run)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    tables = "\n".join(f"  {name:12} {shows}" for name, shows in TABLES.items())
    parser = suite_parser("attention", _DESCRIPTION, f"{_EXAMPLES}\ntables:\n{tables}")
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all")
    add_rows(parser)
    add_run_options(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--validation", action="store_true", help="show validation accuracy alone")
    shown.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help=f"draw there whom devices listen to ({BEST} on vmnist and air, an early round and the "
        "last, the first seed; figure 5) and accuracy as stations join (figure 6)",
    )
    parser.add_argument("--artifacts", type=Path, default=_ARTIFACTS, help="where exports are kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
