"""`make bench-attack`: honest throughput under floods, and the return after a kill -9.

Each row is measured once a seed and kept in benchmarks/results/attack.jsonl under its settings; a
second call measures only what is missing. One run of a flood takes about 25 s, one of the recovery
about 60 s, on two free cores. Fleet, flood, broker and aggregator share the machine: "cores" says
how much of a core each of them took while the flood was on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tabulate import tabulate

from benchmarks.aggregator.broker import SETTINGS
from benchmarks.aggregator.under_attack import KINDS, measure_recovery, measure_under_attack
from benchmarks.harness import RESULTS, StoredRuns

ROWS = (*KINDS, "recovery")
TARGETS = {"outside": "at least 80%", "enrolment": "at least 80%", "insider": "at least 60%"}
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A row's run under ``settings``; seeds only count runs that are alike."""

    row: str
    seed: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, by name."""

    figures: Figures


def main() -> int:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aggregator.attack", description=__doc__
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (3)")
    parser.add_argument("--rate", type=float, default=10_000, help="flood, messages/s (10000)")
    parser.add_argument("--devices", type=int, default=200, help="honest, connected (200)")
    parser.add_argument("--rounds", type=int, default=15, help="measured in each run (15)")
    parser.add_argument(
        "--broker", choices=list(SETTINGS), default="recommended", help="Mosquitto's settings"
    )
    parser.add_argument("--updates", type=int, default=100_000, help="in the open round (100000)")
    parser.add_argument("--table-only", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    stored = StoredRuns[Run, Outcome](RESULTS, "attack", Outcome)
    table = []
    for row in arguments.rows:
        names = ("updates",) if row == "recovery" else ("rate", "devices", "rounds", "broker")
        settings = {name: getattr(arguments, name) for name in names}
        runs: list[Figures] = []
        for seed in range(arguments.seeds):
            run = Run(row, seed, settings)
            measure = None if arguments.table_only else partial(_measure, run)
            outcome = stored.found_or_made(run, measure)
            if outcome is not None:
                runs.append(outcome.figures)
        if runs:
            table += _lines(row, runs)
    print(tabulate(table, headers=("", "median", "worst", "target"), disable_numparse=True))
    return 0


def _measure(run: Run) -> Outcome:
    print(f"measuring {run}", file=sys.stderr, flush=True)
    settings, load = run.settings, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        if run.row == "recovery":
            back = measure_recovery(int(settings["updates"]), 3, Path(name))
            return Outcome(
                {"seconds": back.slowest_seconds, "behind": back.behind, "load_average": load}
            )
        devices, rounds = int(settings["devices"]), int(settings["rounds"])
        found = measure_under_attack(
            run.row, settings["rate"], devices, rounds, Path(name), settings["broker"]
        )
    return Outcome(
        {
            "unloaded": found.unloaded,
            "loaded": found.loaded,
            "flood_rate": found.flood_rate,
            "share": found.share,
            "resent": found.resent,
            "load_average": load,
            **{f"cores of {name}": cores for name, cores in found.cores.items()},
        }
    )


def _lines(row: str, runs: list[Figures]) -> list[tuple[str, str, str, str]]:
    def line(
        label: str, name: str, form: str, target: str, worst: Callable[[list[float]], float]
    ) -> tuple[str, str, str, str]:
        values = [run[name] for run in runs]
        median = statistics.median(values)
        return label, format(median, form), format(worst(values), form), target

    if row == "recovery":
        return [
            line("back after kill -9, s", "seconds", ".2f", "at most 5", max),
            line("  updates behind the checkpoint", "behind", ",.0f", "", max),
        ]
    return [
        line(f"{KINDS[row]}: messages a second", "flood_rate", ",.0f", "10,000", min),
        line("  honest updates a second without", "unloaded", ",.0f", "", min),
        line("  honest updates a second with", "loaded", ",.0f", "", min),
        line("  share", "share", ".0%", TARGETS.get(row, ""), min),
        line("  honest updates sent again", "resent", ",.0f", "", max),
        *(
            line(f"  {name}", name, ".2f", "", max)
            for name in sorted(runs[0])
            if name.startswith("cores of")
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
