"""What befalls clocks, homes, brokers and connections, in simulated time: do the living go on?

Jepsen's list for clocks (bump, strobe, skew), and what an operator does on a bad day. The tests
make a few mixtures; `python -m tests.attacks.nemeses --runs 1000` makes many. After each, every
device has to be counted again without anybody's help, and nothing may be lost or counted twice.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.attacks.stage import Stage
from tests.faults.oracle import Mismatch, judge

DAY_SECONDS = 86_400.0
DEVICES = 4
ROUND = (
    f"quorum = 2\nwait_for_devices = {DEVICES}\ndeadline_seconds = 60\npause_seconds = 5\n"
    "resume_grace_seconds = 10"
)
_MOST_STEP_SECONDS = 100 * DAY_SECONDS
_MOST_SKEW = 0.01
_STROBES = 20

Nemesis = Callable[[Stage, np.random.Generator], None]


def _step_seconds(rng: np.random.Generator) -> float:
    """From a second to months, forwards or back."""
    seconds = float(np.exp(rng.uniform(0.0, np.log(_MOST_STEP_SECONDS))))
    return seconds if rng.random() < 0.5 else -seconds


def bump(stage: Stage, rng: np.random.Generator) -> None:
    """The aggregator's calendar steps, under it or while it is down."""
    if down := rng.random() < 0.5:
        stage.kill_aggregator()
    stage.offset_seconds = _step_seconds(rng)
    if down:
        stage.start_aggregator()


def put_right(stage: Stage, rng: np.random.Generator) -> None:
    """As NTP does once it has reached a server; under the aggregator, or while it is down."""
    if down := rng.random() < 0.5:
        stage.kill_aggregator()
    stage.offset_seconds -= stage.ahead_seconds
    if down:
        stage.start_aggregator()


def strobe(stage: Stage, rng: np.random.Generator) -> None:
    """The aggregator's calendar jumps there and back."""
    before, there = stage.offset_seconds, _step_seconds(rng)
    for turn in range(_STROBES):
        stage.offset_seconds = before + (there if turn % 2 == 0 else 0.0)
        stage.run(float(rng.exponential(5.0)))
    stage.offset_seconds = before


def skew(stage: Stage, rng: np.random.Generator) -> None:
    """A device's crystal, or the aggregator's, is wrong from its next start on, which is now."""
    rate = 1.0 + float(rng.uniform(-_MOST_SKEW, _MOST_SKEW))
    place = int(rng.integers(DEVICES + 1))
    if place == DEVICES:
        stage.kill_aggregator()
        stage.rate = rate
        stage.start_aggregator()
    else:
        device = stage.devices[place]
        device.kill()
        device.rate = rate
        device.start()


def restart(stage: Stage, rng: np.random.Generator) -> None:
    """One of all is killed, and starts a while later."""
    place = int(rng.integers(DEVICES + 1))
    away_seconds = float(rng.exponential(60.0))
    if place == DEVICES:
        stage.kill_aggregator()
        stage.run(away_seconds)
        stage.start_aggregator()
    else:
        stage.devices[place].kill()
        stage.run(away_seconds)
        stage.devices[place].start()


def cut_off(stage: Stage, rng: np.random.Generator) -> None:
    """Nothing reaches anybody for a while, though all are connected."""
    stage.drop = lambda parcel: True
    stage.run(float(rng.exponential(60.0)))
    stage.drop = lambda parcel: False


def replace_broker(stage: Stage, rng: np.random.Generator) -> None:
    """An empty broker at the same address."""
    stage.replace_broker()


def sleep(stage: Stage, rng: np.random.Generator) -> None:
    """All are suspended for up to a week; clocks run on."""
    stage.now_seconds += float(rng.uniform(0.0, 7 * DAY_SECONDS))


def move(stage: Stage, rng: np.random.Generator) -> None:
    """The aggregator's machine dies; its backup is put back on another one, of another calendar."""
    home = stage.fleet.aggregator.folder
    backup = home.with_name("backup")
    generation = stage.store.facts.generation
    stage.kill_aggregator()
    shutil.rmtree(backup, ignore_errors=True)
    shutil.copytree(home, backup)
    stage.start_aggregator()
    stage.run(float(rng.exponential(120.0)))
    stage.kill_aggregator()
    shutil.rmtree(home)
    shutil.copytree(backup, home)
    stage.offset_seconds = _step_seconds(rng)
    # As the command says where this machine's calendar, which it reads, is behind the other's.
    assert stage.command("restored", "--after", str(generation)) == 0
    stage.start_as_told()


OF_CLOCKS: tuple[Nemesis, ...] = (bump, put_right, strobe, skew)
OF_ALL: tuple[Nemesis, ...] = (*OF_CLOCKS, restart, cut_off, replace_broker, sleep)
SETS_BACK: tuple[Nemesis, ...] = (move,)
"""After these, devices know of updates that the home has forgotten: no judging by its records."""


def torment(
    stage: Stage, seed: int, events: int, nemeses: tuple[Nemesis, ...] = OF_ALL
) -> Counter[str]:
    """``events`` of these, a minute or so apart; how many of each there were."""
    rng = np.random.default_rng(seed)
    caused = Counter[str]()
    stage.await_version(1)
    for _ in range(events):
        nemesis = nemeses[int(rng.integers(len(nemeses)))]
        nemesis(stage, rng)
        caused[nemesis.__name__] += 1
        stage.run(float(rng.exponential(60.0)))
    return caused


def main() -> int:
    """0, or 1 when somebody was shut out, or an update lost or counted twice."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.nemeses", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many (100)")
    parser.add_argument("--events", type=int, default=8, help="in each (8)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (1)")
    parser.add_argument("--go-on", action="store_true", help="after a run that failed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    caused, failed = Counter[str](), 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            stage = Stage(Path(folder), DEVICES, ROUND)
            sets_back = seed % 4 == 0
            try:
                nemeses = OF_ALL + SETS_BACK if sets_back else OF_ALL
                caused += torment(stage, seed, arguments.events, nemeses)
                stage.live_on()
                stage.close()
                if not sets_back:
                    judge(stage.fleet)
            except Mismatch as error:
                failed += 1
                print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
                if not arguments.go_on:
                    return 1
            finally:
                stage.close()
    told = ", ".join(f"{count} {name}" for name, count in caused.most_common())
    print(
        f"{arguments.runs} runs, {caused.total():,} events ({told}): in {failed} of them a living "
        "device was shut out, or an update lost or counted twice"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
