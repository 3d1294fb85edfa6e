"""Thousands of restarts with kills in the middle of publications, every sealing noted.

The tests make a few; `python -m tests.attacks.restarts --restarts 3000` makes many.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from device_sdk.rounds.pace import Pace
from tests.attacks.nonce_ledger import NonceLedger
from tests.attacks.stage import Stage
from tests.faults.oracle import judge

__all__ = ["RestartFigures", "make_restart_stage", "restart_often"]

_PACE = Pace(answer_seconds=2.0, fetch_seconds=2.0, reopen_seconds=0.5, most_seconds=20.0)
_ROUND = "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 6\npause_seconds = 0.5"


class _Killed(BaseException):
    pass


@dataclass(frozen=True)
class RestartFigures:
    """``in_publications``: deaths of the aggregator between two of the messages it sent."""

    restarts: int
    in_publications: int
    sealed: int
    encapsulated: int
    reused: int


def make_restart_stage(folder: Path) -> Stage:
    """Two devices in short rounds."""
    return Stage(folder, 2, _ROUND, pace=_PACE)


def restart_often(stage: Stage, ledger: NonceLedger, restarts: int, seed: int) -> RestartFigures:
    """Kill and start the aggregator, or one of the devices, ``restarts`` times."""
    rng = np.random.default_rng(seed)
    original = stage.broker.publish
    left = killed = 0

    def publish(topic: str, payload: bytes, *, retain: bool = False) -> None:
        nonlocal left
        original(topic, payload, retain=retain)
        if retain or "/down/" in topic:
            left -= 1
            if left == 0:
                raise _Killed

    stage.broker.publish = publish  # type: ignore[method-assign]
    for _ in range(restarts):
        left = int(rng.integers(1, 30))
        try:
            stage.run(float(rng.uniform(1.0, 7.0)))
        except _Killed:
            killed += 1
        left = 0
        stage.broker.seen.clear()
        if rng.random() < 0.8:
            stage.kill_aggregator()
            stage.start_aggregator()
        else:
            device = stage.devices[int(rng.integers(2))]
            device.kill()
            device.start()
        if rng.random() < 0.02:
            with stage.store.database.transaction():
                stage.store.facts.rotation_due = True
    stage.broker.publish = original  # type: ignore[method-assign]
    return RestartFigures(restarts, killed, ledger.sealed, ledger.encapsulated, len(ledger.reused))


def main() -> int:
    """0, or 1 when a key met a nonce twice."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=3000, help="how many (3000)")
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    memory = Path("/dev/shm")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
    ):
        ledger = NonceLedger(patch)
        stage = make_restart_stage(Path(folder))
        figures = restart_often(stage, ledger, arguments.restarts, arguments.seed)
        stage.close()
        judge(stage.fleet)
    print(
        f"{figures.restarts:,} restarts, {figures.in_publications:,} of them in the middle of a "
        f"publication; {figures.sealed:,} sealings and {figures.encapsulated:,} encapsulations, "
        f"{figures.reused} with a key and nonce used before"
    )
    return 1 if figures.reused else 0


if __name__ == "__main__":
    sys.exit(main())
