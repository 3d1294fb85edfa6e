"""`make soak MINUTES=30 DEVICES=500`: a fleet without faults for long; does anything grow?

The product's agents in a few processes, the product's service in another, and Mosquitto. Every few
seconds memory, open files and threads of each process are read; the table has them after a warm-up
and at the end. Fails when something grew (see ``growth.py``), or nothing was counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Hundreds of threads share a process here, which is no device's way: without this their allocator's
# own caches fill for an hour, and hide what the program holds.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1")

import numpy as np
from tabulate import tabulate

from tests.faults.aggregator_process import serve
from tests.faults.broker_setups import make_broker
from tests.faults.device_process import live
from tests.faults.fleet_home import make_fleet
from tests.faults.growth import Reading, grown, memory_per_hour, read_process, too_short
from tests.faults.known import MOST_DEVICES
from tests.faults.processes import Victim

_EVERY_SECONDS = 5.0


def main() -> int:
    """0, or 1 when something grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--devices", type=int, default=500)
    parser.add_argument("--hosts", type=int, default=4, help="processes that share them (4)")
    parser.add_argument("--deadline-seconds", type=float, default=20.0, help="of a round (20)")
    parser.add_argument("--warm-up-minutes", type=float, help="default: a fifth, at most 5")
    parser.add_argument("--out", type=Path, help="write all readings to this file")
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    warm_up = 60 * (arguments.warm_up_minutes or min(5.0, arguments.minutes / 5))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    readings, counted, rounds = _run(folder, arguments, seconds)
    shutil.rmtree(folder)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps([asdict(r) for r in readings], indent=0) + "\n")
    print(_table(readings, warm_up))
    print(
        f"\n{arguments.devices} devices, {arguments.minutes:g} minutes, {rounds} rounds, "
        f"{counted:,} updates counted; load average {os.getloadavg()[0]:.1f}"
    )
    if too_short(readings, warm_up):
        print("too short to tell growing memory from caches that fill: files and threads only")
    problems = grown(readings, warm_up)
    for problem in problems:
        print(f"grew: {problem}", file=sys.stderr)
    return 1 if problems or not counted else 0


def _run(
    folder: Path, arguments: argparse.Namespace, seconds: float
) -> tuple[list[Reading], int, int]:
    broker = make_broker("mosquitto", folder)
    broker.start()
    lines = (
        f"quorum = {max(1, arguments.devices // 2)}\nwait_for_devices = {arguments.devices}\n"
        f"deadline_seconds = {arguments.deadline_seconds}\npause_seconds = 5"
    )
    url = f"mqtt://127.0.0.1:{broker.port}"
    fleet = make_fleet(folder, url, arguments.devices, lines, 1, shared_columns=True)
    counters, log = str(folder / "counters"), str(folder / "aggregator.log")
    aggregator = Victim(serve, (str(fleet.aggregator.folder), counters, log, False))
    hosts = {
        f"devices {number}": Victim(
            live,
            (
                [str(fleet.devices[place]) for place in group],
                [int(place) % MOST_DEVICES for place in group],
                counters,
                str(folder / f"devices-{number}.log"),
                False,
            ),
        )
        for number, group in enumerate(
            np.array_split(np.arange(arguments.devices), arguments.hosts), start=1
        )
    }
    readings: list[Reading] = []
    try:
        aggregator.start()
        for host in hosts.values():
            host.start()
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            named = {"broker": broker.pid, "aggregator": aggregator.pid}
            named |= {name: host.pid for name, host in hosts.items()}
            readings += [read_process(name, pid, passed) for name, pid in named.items()]
            time.sleep(_EVERY_SECONDS)
    finally:
        for victim in (*hosts.values(), aggregator):
            victim.kill()
        broker.kill()
    store = fleet.open_store()
    (counted,) = store.database.row("SELECT count(*) FROM verdicts WHERE reason IS NULL") or (0,)
    latest = store.first.rounds.latest()
    store.database.close()
    return readings, int(counted), latest[0].round if latest else 0


def _table(readings: list[Reading], warm_up: float) -> str:
    rows = []
    for name in dict.fromkeys(reading.process for reading in readings):
        mine = [r for r in readings if r.process == name and r.seconds >= warm_up]
        first, last = mine[0], mine[-1]
        peak = max(r.resident_mb for r in mine)
        rows.append(
            (
                name,
                f"{first.resident_mb:.1f}",
                f"{last.resident_mb:.1f}",
                f"{peak:.1f}",
                f"{memory_per_hour(mine):+.1f}",
                f"{first.files} / {last.files}",
                f"{first.threads} / {last.threads}",
            )
        )
    head = (
        "process",
        "MB after warm-up",
        "at the end",
        "peak",
        "MB an hour",
        "open files",
        "threads",
    )
    return tabulate(rows, headers=head, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
