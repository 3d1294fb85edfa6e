"""`make chaos SEED=n MINUTES=m`: torment fleets, judge them, and add up what was injected.

Each run has a fleet of its own with the seed, the seed plus one, and so on, with each broker in
turn. A run that breaks the promise stops everything; its folder with homes and logs is kept, and
--seed, --brokers and --seconds repeat it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from tests.faults.broker_setups import BROKERS
from tests.faults.chaos import RunSettings, run
from tests.faults.cluster_chaos import STORES, ClusterSettings, run_cluster
from tests.faults.oracle import Mismatch
from tests.faults.report import append_result, read_results, table, where


def main() -> int:
    """0, or 1 when the promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run (1)")
    parser.add_argument("--minutes", type=float, default=3.0, help="all runs together (3)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of faults in one run (40)")
    parser.add_argument("--devices", type=int, default=24, help="in one run (24)")
    parser.add_argument("--hosts", type=int, default=3, help="processes that share them (3)")
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=list(BROKERS))
    parser.add_argument(
        "--cluster", action="store_true", help="coordinators and workers, on PostgreSQL and SQLite"
    )
    parser.add_argument("--out", type=Path, help="add each run's figures to this file")
    parser.add_argument("--table-only", action="store_true", help="print the table of --out")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp()) / "chaos.jsonl"
    until = time.monotonic() + 60 * arguments.minutes
    seed = arguments.seed
    while not arguments.table_only and time.monotonic() < until:
        broker = arguments.brokers[(seed - arguments.seed) % len(arguments.brokers)]
        seconds = min(arguments.seconds, max(5.0, until - time.monotonic()))
        common = seed, broker, seconds, arguments.devices, arguments.hosts
        settings = _cluster_settings(*common) if arguments.cluster else RunSettings(*common)
        said = f"seed {seed}, {where(settings)}"
        memory = Path("/dev/shm")
        folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        try:
            result = (
                run_cluster(settings, folder)
                if isinstance(settings, ClusterSettings)
                else run(settings, folder)
            )
        except Mismatch as error:
            print(
                f"seed {seed}, {where(settings)}: {error}\nthe run's folder: {folder}",
                file=sys.stderr,
            )
            return 1
        shutil.rmtree(folder)
        append_result(out, settings, result)
        judged = result.judgement
        print(
            f"{said}: {result.faults.total():,} faults, {judged.trained} updates, "
            f"{judged.receipted}, lost {judged.lost}, twice {judged.twice}, "
            f"{result.seconds:.0f} s",
            flush=True,
        )
        seed += 1
    print()
    print(table(read_results(out)))
    return 0


def _cluster_settings(
    seed: int, broker: str, seconds: float, devices: int, hosts: int
) -> ClusterSettings:
    """Each store in turn, and of each two runs one with sums and one with bodies."""
    store = STORES[seed % 2]
    return ClusterSettings(
        seed, broker, seconds, devices, hosts, store=store, adds_up=seed // 2 % 2 == 0
    )


if __name__ == "__main__":
    sys.exit(main())
