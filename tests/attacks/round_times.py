"""How long rounds last, and who is counted in them: both ends in one process, simulated time.

Twenty-five devices at the task file's defaults, by who is awake and how long each trains. A device
counts as shut out of a round that it was awake for and did not come into.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
from tabulate import tabulate

from aggregator.task.file import RoundSettings
from tests.attacks.stage import Stage

DEVICES = 25
QUICK, SLOW, SLOWEST = 4.0, 40.0, 140.0
"""Seconds of a training: the slowest device's is all that ``train_seconds`` allows by default,
but for a margin."""


@dataclass
class Fleet:
    """Devices by their places. ``trains``: seconds; ``sleeps``: never there; ``flaky``: of a round,
    the chance that a device is away."""

    name: str
    trains: tuple[float, ...] = (QUICK,) * DEVICES
    sleeps: frozenset[int] = frozenset()
    flaky: float = 0.0


MIXED = (QUICK,) * 20 + (SLOW,) * 4 + (SLOWEST,)
FLEETS = (
    Fleet("all awake, alike"),
    Fleet("all awake, 4 slow, 1 slowest", MIXED),
    Fleet("5 of 25 awake", sleeps=frozenset(range(5, DEVICES))),
    Fleet("5 of 25 awake, the slowest too", MIXED, frozenset(range(4, DEVICES - 1))),
    Fleet("each away in a tenth of the rounds, 4 slow, 1 slowest", MIXED, flaky=0.1),
)


@dataclass
class Played:
    """``seconds``: of each round; ``counted``: of each device, the share of the rounds that it was
    awake for in which it counted."""

    seconds: list[float] = field(default_factory=list)
    counted: dict[int, float] = field(default_factory=dict)


def play(
    folder: Path,
    fleet: Fleet,
    rounds: int,
    seed: int = 0,
    lines: str = "",
    meanwhile: Callable[[Stage, int], None] = lambda stage, number: None,
) -> Played:
    """So many rounds of a fleet. ``lines``: of the table ``[round]``; ``meanwhile`` is called when
    a round, by its number, was found open."""
    rng = np.random.default_rng(seed)
    devices = len(fleet.trains)
    usual = RoundSettings()
    for name in ("deadline_seconds", "least_deadline_seconds"):
        # By default, which on the stage is another one.
        if f"\n{name}" not in f"\n{lines}":
            lines += f"\n{name} = {getattr(usual, name)}"
    stage = Stage(folder, devices, lines)
    awake: dict[int, set[int]] = {}
    try:
        for device, seconds in zip(stage.devices, fleet.trains, strict=True):
            device.train_seconds = seconds
        for place in fleet.sleeps:
            stage.devices[place].kill()
        machine = stage.parts.first.rounds
        while (number := machine.next_number() - (machine.current is not None)) <= rounds:
            if machine.current is not None and number not in awake:
                there = [place for place in range(devices) if place not in fleet.sleeps]
                awake[number] = {p for p in there if rng.random() >= fleet.flaky}
                for place in there:
                    stage.devices[place].set_connected(place in awake[number])
                meanwhile(stage, number)
            stage.run(0.25)
        return _played(stage, awake, rounds)
    finally:
        stage.close()


def _played(stage: Stage, awake: dict[int, set[int]], rounds: int) -> Played:
    store = stage.parts.store.first
    rows = sorted(store.rounds.latest(rounds + 1), key=lambda each: each.round)[:rounds]
    found = Played([(each.closed_unix_seconds or 0.0) - each.opened_unix_seconds for each in rows])
    ids = {device.grant.device_id: device.place for device in stage.devices}
    counted = {
        row.round: {
            ids[device_id]
            for device_id, seconds in store.log.came(row.generation, row.round)
            if seconds is not None
        }
        for row in rows
    }
    for place in ids.values():
        there = [row.round for row in rows if place in awake.get(row.round, ())]
        if there:
            found.counted[place] = sum(place in counted[each] for each in there) / len(there)
    return found


def main() -> int:
    """0: prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.round_times", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each fleet (20)")
    parser.add_argument("--lines", default="", help="of the table [round]")
    arguments = parser.parse_args()
    rows = []
    for fleet in FLEETS:
        with tempfile.TemporaryDirectory() as folder:
            found = play(Path(folder), fleet, arguments.rounds, lines=arguments.lines)
        shares = [
            [share for place, share in found.counted.items() if fleet.trains[place] == seconds]
            for seconds in (QUICK, SLOW, SLOWEST)
        ]
        first, *later = found.seconds
        rows.append(
            (
                fleet.name,
                f"{first:.1f}",
                f"{np.median(later):.1f}",
                f"{max(later):.1f}",
                *(f"{np.mean(each):.0%}" if each else "-" for each in shares),
            )
        )
    headers: tuple[str, ...] = (
        "fleet",
        "first round, s",
        "median of the others",
        "longest of them",
    )
    headers += tuple(f"counted, of {each:g} s" for each in (QUICK, SLOW, SLOWEST))
    print(tabulate(rows, headers=headers, tablefmt="github"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
