"""`make chaos SEED=n MINUTES=m`: torment fleets, judge them, and add up what was injected.

Each run has a fleet of its own with the seed, the seed plus one, and so on, with each broker in
turn. A run that breaks the promise, or shuts a device out, stops everything; its folder with homes
and logs is kept, and --seed, --brokers and --seconds repeat it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from tests.faults.broker_setups import BROKERS
from tests.faults.chaos import RunSettings, run
from tests.faults.cluster_chaos import KILLS, ClusterSettings, run_cluster
from tests.faults.oracle import Mismatch
from tests.faults.ray_chaos import run_ray
from tests.faults.report import append_result, kill_costs, living, read_results, split, table, where
from tests.servers.namespaces import missing as namespaces_missing
from tests.servers.postgres import FAKETIME

_Scene = Callable[[ClusterSettings], ClusterSettings]
_CELLS = {"cells": 2, "workers": 4, "broker": "mosquitto"}
_SCENES: dict[str, _Scene] = {
    "kills": partial(replace, store="postgres", adds_up=True, only=KILLS),
    "postgres-sums": partial(replace, store="postgres", adds_up=True),
    "sqlite-bodies": partial(replace, store="sqlite", adds_up=False),
    "machines": partial(replace, machines=True, **_CELLS),
    "ray": partial(replace, ray=True, machines=True, pause_seconds=1.2, **_CELLS),
    "ray-alone": partial(replace, ray=True, pause_seconds=1.2, **_CELLS),
    "postgres-bodies": partial(replace, store="postgres", adds_up=False),
    "sqlite-sums": partial(replace, store="sqlite", adds_up=True),
}
"""Of a cluster: each store with sums and with bodies, two cells on machines of their own, and
under Ray, on machines and on one; and deaths alone."""


def main() -> int:
    """0, 1 when the promise was broken, or 130 when it was interrupted."""
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
    parser.add_argument(
        "--scenes", nargs="+", choices=_SCENES, default=list(_SCENES), help="of --cluster, by turns"
    )
    parser.add_argument(
        "--ladder", action="store_true", help="devices train parts of one model (one aggregator)"
    )
    parser.add_argument(
        "--late", action="store_true", help="updates of closed rounds count in the open one"
    )
    parser.add_argument("--out", type=Path, help="add each run's figures to this file")
    parser.add_argument("--table-only", action="store_true", help="print the table of --out")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has the first ignored
        signal.signal(number, signal.default_int_handler)
    out = arguments.out or Path(tempfile.mkdtemp()) / "chaos.jsonl"
    until = time.monotonic() + 60 * arguments.minutes
    seed = arguments.seed
    if arguments.late and arguments.ladder:
        parser.error("--late and --ladder: the ladder's rungs have a low rank")
    scenes = _scenes(arguments.scenes) if arguments.cluster else []
    brokers = _brokers(arguments.brokers) if arguments.cluster else arguments.brokers
    if not brokers:
        return 0
    while not arguments.table_only and time.monotonic() < until:
        seconds = min(arguments.seconds, max(5.0, until - time.monotonic()))
        broker = brokers[(seed - arguments.seed) % len(brokers)]
        common = seed, broker, seconds, arguments.devices, arguments.hosts
        settings = RunSettings(*common, ladder=arguments.ladder, late=arguments.late)
        if scenes:
            # Rounds of two seconds make few versions where so much is started anew.
            settings = ClusterSettings(
                *common,
                deadline_seconds=5.0,
                breath_events=12,
                breath_seconds=5.0,
                adds_up=seed % 2 == 0,
                late=arguments.late,
            )
            settings = scenes[(seed - arguments.seed) % len(scenes)](settings)
        said = f"seed {seed}, {where(settings)}"
        memory = Path("/dev/shm")
        folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        try:
            if not isinstance(settings, ClusterSettings):
                result = run(settings, folder)
            else:
                result = (run_ray if settings.ray else run_cluster)(settings, folder)
        except Mismatch as error:
            print(
                f"seed {seed}, {where(settings)}: {error}\nthe run's folder: {folder}",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            return 130
        shutil.rmtree(folder)
        append_result(out, settings, result)
        judged = result.judgement
        print(
            f"{said}: {result.faults.total():,} faults ({split(result.faults)}), "
            f"{judged.trained} updates, {judged.receipted}, lost {judged.lost}, "
            f"twice {judged.twice}, in a later round than their own {judged.late}, "
            f"{result.seconds:.0f} s",
            flush=True,
        )
        seed += 1
    print()
    results = read_results(out)
    print(table(results))
    print(f"\n{living(results)}")
    print(kill_costs(results))
    return 0


def _brokers(wanted: Collection[str]) -> list[str]:
    """For a cluster; says what is left out, and why."""
    if "amqtt" in wanted:
        print(
            "skipped: amqtt: it throws out whoever connects while another client subscribes "
            '("dictionary changed size during iteration"), and workers subscribe to thousands of '
            "topics"
        )
    return [each for each in wanted if each != "amqtt"]


def _scenes(wanted: Collection[str]) -> list[_Scene]:
    """Those that this machine has what it takes for; says what is left out, and why."""
    ray = "" if importlib.util.find_spec("ray") else "pip install 'tessera-edge[cluster]'"
    networks = namespaces_missing()
    if FAKETIME is None:
        print(
            "skipped: clocks and failovers to another one of PostgreSQL: apt-get install faketime"
        )
    missing = {"machines": networks, "ray": ray or networks, "ray-alone": ray}
    found = []
    for name in wanted:
        if reason := missing.get(name):
            print(f"skipped: {name}: {reason}")
        else:
            found.append(_SCENES[name])
    return found


if __name__ == "__main__":
    sys.exit(main())
