"""`make bench-attack`: honest throughput under floods, and the return after a kill -9.

Each row is measured once a seed and kept in benchmarks/results/attack.json under its settings; a
second call measures only what is missing. One run of a flood takes about 25 s, one of the recovery
about 60 s, on two free cores. Fleet, flood, broker and aggregator share the machine: "cores" says
how much of a core each of them took while the flood was on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tabulate import tabulate

from benchmarks.aggregator.broker import SETTINGS
from benchmarks.aggregator.recovery import measure_recovery
from benchmarks.aggregator.under_attack import KINDS, measure_under_attack

RESULTS = Path(__file__).parents[1] / "results" / "attack.json"
ROWS = (*KINDS, "recovery")
TARGETS = {"outside": "at least 80%", "enrolment": "at least 80%", "insider": "at least 60%"}
Figures = dict[str, float]


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
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    table = []
    for row in arguments.rows:
        if row == "recovery":
            settings = {"updates": arguments.updates}
        else:
            names = ("rate", "devices", "rounds", "broker")
            settings = {name: getattr(arguments, name) for name in names}
        runs: list[Figures] = []
        for seed in range(arguments.seeds):
            key = f"{row} {json.dumps(settings, sort_keys=True)} {seed}"
            if key not in stored and not arguments.table_only:
                print(f"measuring {key}", file=sys.stderr, flush=True)
                stored[key] = _measure(row, settings)
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
            if key in stored:
                runs.append(stored[key])
        if runs:
            table += _lines(row, runs)
    print(tabulate(table, headers=("", "median", "worst", "target"), disable_numparse=True))
    return 0


def _measure(row: str, settings: dict[str, Any]) -> Figures:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        if row == "recovery":
            back = measure_recovery(int(settings["updates"]), 3, Path(name))
            return {"seconds": back.slowest_seconds, "behind": back.behind, "load_average": load}
        devices, rounds = int(settings["devices"]), int(settings["rounds"])
        found = measure_under_attack(
            row, settings["rate"], devices, rounds, Path(name), settings["broker"]
        )
    return {
        "unloaded": found.unloaded,
        "loaded": found.loaded,
        "flood_rate": found.flood_rate,
        "share": found.share,
        "resent": found.resent,
        "load_average": load,
        **{f"cores of {name}": cores for name, cores in found.cores.items()},
    }


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
