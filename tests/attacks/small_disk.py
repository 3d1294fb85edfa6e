"""Both ends on a disk that fills up in the middle of commits, and has room again; a child process.

`python -m tests.attacks.small_disk KIND FOLDER SEED TRIALS` prints one line of JSON. A real
service and real participants, with their real files; broker and clock are simulated. An aggregator
that meets a full disk dies, as the command does, and is started again and again; a device's thread
goes on, as the agent's does.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import sys
import traceback
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.serve.uplink import Uplink
from device_sdk.home.round_store import OutboxRow
from device_sdk.rounds.sender import Sender
from device_sdk.wire.publish.receipts import Receipt, Verdict
from device_sdk.world import Pace
from tests.attacks.simulated_broker import Parcel
from tests.attacks.simulated_device import SimulatedDevice
from tests.attacks.stage import Stage
from tests.faults.hooks import before
from tests.faults.oracle import judge

_PAGE = 4096
_MOST_PAGES_LEFT = 60
_FULL_SECONDS = 150.0
_PACE = Pace(answer_seconds=5.0, fetch_seconds=5.0, reopen_seconds=2.0, most_seconds=30.0)


class Disk(Protocol):
    """Something that can be full."""

    def fill(self, left_bytes: int) -> None:
        """Leave so much room."""

    def free(self) -> None:
        """There is room again."""


class SmallFileSystem:
    """The file system of ``folder``, filled by a file that takes what is left."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, left_bytes: int) -> None:
        """See :class:`Disk`."""
        with self._ballast.open("wb") as file:
            state = os.fstatvfs(file.fileno())
            taken = state.f_bavail * state.f_bsize - left_bytes
            os.posix_fallocate(file.fileno(), 0, max(_PAGE, taken))

    def free(self) -> None:
        """See :class:`Disk`."""
        self._ballast.unlink()


class FileLimit:
    """No file of this process may grow beyond the largest one and what is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, left_bytes: int) -> None:
        """See :class:`Disk`."""
        journals = self._folder.rglob("*.sqlite-wal")
        largest = max(path.stat().st_size for path in journals)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + left_bytes, self._limits[1]))

    def free(self) -> None:
        """See :class:`Disk`."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


class _Device(SimulatedDevice):
    """A full disk ends none of its threads: see ``Agent._guarded``."""

    failures: Counter[str]

    def deliver(self, parcel: Parcel) -> None:
        """See :class:`SimulatedDevice`."""
        try:
            super().deliver(parcel)
        except sqlite3.Error as error:
            self.failures[_where(error)] += 1

    def turn(self) -> bool:
        """See :class:`SimulatedDevice`."""
        try:
            return super().turn()
        except sqlite3.Error as error:
            self.failures[_where(error)] += 1
            return False


def _where(error: BaseException) -> str:
    """The product's method whose commit failed."""
    frames = [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if {"device_sdk", "aggregator"} & {*Path(frame.filename).parts}
    ]
    return next(name for name in reversed(frames) if not name.endswith("transaction"))


class _Witness:
    """Looks, over connections of its own, whether what is said was committed before."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.receipts = self.sends = 0
        self.too_early: list[str] = []
        before(Uplink, "receipt", self._receipt)
        before(Sender, "_send", self._send)

    def _receipt(self, uplink: Uplink, device_id: bytes, receipt: Receipt) -> None:
        if receipt.verdict is not Verdict.COUNTED:
            return
        self.receipts += 1
        query = "SELECT generation, round FROM verdicts WHERE device_id = ?"
        decided = _read(self._stage.fleet.aggregator.database, query, device_id)
        if not set(self._waiting(device_id, receipt.digest)) <= set(decided):
            self.too_early.append("receipt")

    def _send(self, sender: Sender, row: OutboxRow) -> None:
        self.sends += 1
        if not self._waiting(sender._device_id, row.digest):
            self.too_early.append("update")

    def _waiting(self, device_id: bytes, digest: bytes) -> list[tuple[Any, ...]]:
        place = self._stage.fleet.device_ids.index(device_id)
        database = self._stage.fleet.devices[place] / "device.sqlite"
        return _read(database, "SELECT generation, round FROM outbox WHERE digest = ?", digest)


def _read(path: Path, query: str, value: bytes) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return database.execute(query, (value,)).fetchall()


def run(folder: Path, disk: Disk, seed: int, trials: int) -> dict[str, Any]:
    """Fill and free the disk ``trials`` times; what failed, and what the oracle says."""
    rng = np.random.default_rng(seed)
    stage = Stage(folder, pace=_PACE)
    witness = _Witness(stage)
    aggregator_failures: Counter[str] = Counter()
    _Device.failures = Counter()
    for place, device in enumerate(stage.devices):
        device.kill()
        stage.devices[place] = _Device(device.folder, place, stage.broker, stage.clock, _PACE)

    def next_version() -> None:
        stage.next_version()

    for _ in range(trials):
        # A process that ends leaves no journal, so that the next commits need room for theirs.
        for device in stage.devices:
            device.restart()
        stage.restart_aggregator()
        next_version()
        disk.fill(int(rng.integers(_MOST_PAGES_LEFT)) * _PAGE)
        full_until = stage.now_seconds + _FULL_SECONDS
        while stage.now_seconds < full_until:
            try:
                if not stage.aggregator_alive:
                    stage.start_aggregator()
                stage.run(5.0)
            except (sqlite3.Error, AggregatorError) as error:
                aggregator_failures[_where(error)] += 1
                stage.kill_aggregator()
                stage.run(5.0)  # whoever starts it again waits for a moment
        disk.free()
        if not stage.aggregator_alive:
            stage.start_aggregator()
        next_version()
        next_version()
    stage.run_until(lambda: all(d.home.rounds.outbox_size()[0] <= 1 for d in stage.devices))
    stage.close()
    judgement = judge(stage.fleet)
    return {
        "aggregator": aggregator_failures,
        "devices": _Device.failures,
        "receipts": witness.receipts,
        "sends": witness.sends,
        "too early": witness.too_early,
        "trained": judgement.trained,
        "receipted": judgement.receipted,
        "lost": judgement.lost,
        "twice": judgement.twice,
    }


def main() -> None:
    """See the module."""
    kind, folder, seed, trials = sys.argv[1:]
    disk = {"file-system": SmallFileSystem, "file-limit": FileLimit}[kind](Path(folder))
    print(json.dumps(run(Path(folder), disk, int(seed), int(trials))))


if __name__ == "__main__":
    main()
