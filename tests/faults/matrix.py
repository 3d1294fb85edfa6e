"""`make brokers`: a fleet's whole life with each broker at its defaults, near and far away.

Every journey (`tests/faults/journey.py`) is judged by the oracle; the command fails where one does
not come to its end, or an update was lost, counted twice or left without a receipt. Round trips are
those between any client and the broker, made by a proxy: an update and its receipt take two. What
the revoked device had under way is refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from tabulate import tabulate

from tests.faults.journey import BROKERS, JourneyResult, JourneySettings, missing, travel
from tests.faults.oracle import Mismatch

_HEADERS = (
    "broker",
    "round trip, ms",
    "a round, s",
    "back after kill -9, s",
    "counted",
    "late",
    "refused",
    "repeats",
    "without receipt",
    "lost",
    "twice",
    "all, s",
)


def main() -> int:
    """0, or 1 when a journey failed or a broker is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument(
        "--brokers", nargs="+", choices=BROKERS, default=list(BROKERS), help="default: all"
    )
    parser.add_argument(
        "--millis", nargs="+", type=float, default=[0.0, 50.0, 200.0], help="round trips (0 50 200)"
    )
    parser.add_argument("--devices", type=int, default=6, help="at least 4 (6)")
    parser.add_argument("--brisk", action="store_true", help="shorter waits than the product's")
    arguments = parser.parse_args()
    if arguments.devices < 4:
        parser.error(f"--devices {arguments.devices}: a journey takes at least 4")
    if min(arguments.millis) < 0:
        parser.error(f"--millis {min(arguments.millis):g}: a round trip is 0 or more")
    rows: list[tuple[object, ...]] = []
    failed = False
    for broker in arguments.brokers:
        if why := missing(broker):
            print(f"{broker}: {why}", file=sys.stderr)
            failed = True
            continue
        for millis in arguments.millis:
            settings = JourneySettings(broker, millis / 1000, arguments.devices, arguments.brisk)
            memory = Path("/dev/shm")
            folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
            logging.basicConfig(filename=folder / "devices.log", level="WARNING", force=True)
            try:
                result = travel(settings, folder)
            except Mismatch as error:
                print(f"{broker}, {millis:g} ms: {error}\nits folder: {folder}", file=sys.stderr)
                failed = True
                continue
            shutil.rmtree(folder)
            rows.append(_row(settings, result))
            print(tabulate(rows[-1:], _HEADERS, floatfmt=".2f"), flush=True)
            failed |= bool(result.waiting or result.judgement.lost or result.judgement.twice)
    print(f"\n{tabulate(rows, _HEADERS, tablefmt='github', floatfmt='.2f')}")
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(failed)


def _row(settings: JourneySettings, result: JourneyResult) -> tuple[object, ...]:
    judged = result.judgement
    return (
        settings.broker,
        round(settings.round_trip_seconds * 1000),
        result.round_seconds,
        result.return_seconds,
        judged.receipted.get("counted", 0),
        judged.receipted.get("late", 0),
        judged.receipted.get("refused", 0),
        result.repeats,
        result.waiting,
        judged.lost,
        judged.twice,
        round(result.seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
