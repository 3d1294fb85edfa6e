"""Honest updates a second while a stranger floods the topics of updates, against without."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aggregator.serving import serving
from device_sdk.wire.topics import Topics, UpTopic

__all__ = ["AttackFigures", "measure_under_attack"]

_SETTLE_SECONDS = 1.5


@dataclass(frozen=True)
class AttackFigures:
    """Updates a second with receipts. ``flood_rate``: messages a second that were really sent."""

    kind: str
    unloaded: float
    loaded: float
    flood_rate: float

    @property
    def share(self) -> float:
        """Of the unloaded throughput."""
        return self.loaded / self.unloaded


def measure_under_attack(
    kind: str, rate: float, devices: int, rounds: int, folder: Path
) -> AttackFigures:
    """``kind``: ``garbage``, messages like envelopes of unknown sessions, or ``opens``, session
    opens whose admission tag is wrong. Both on the honest devices' own topics, ``rate`` a second.

    The loaded figure is of rounds that began after the flood had.
    """
    with serving(devices, folder, stop_seconds=60) as served:
        load, topics = served.load, folder / "topics"
        write = Topics().write
        topics.write_text("\n".join(write(UpTopic(0, device.handle)) for device in served.fleet))
        load.open_sessions()
        load.run(devices)  # a round to warm up
        unloaded = devices * rounds / load.run(devices * rounds)
        with _flood(served.port, kind, rate, topics, folder / "count") as sent:
            time.sleep(_SETTLE_SECONDS)
            load.run(devices)  # the round that was open when the flood began
            before, began = sent(), time.perf_counter()
            loaded = devices * rounds / load.run(devices * rounds)
            flood_rate = (sent() - before) / (time.perf_counter() - began)
    return AttackFigures(kind, unloaded, loaded, flood_rate)


@contextmanager
def _flood(
    port: int, kind: str, rate: float, topics: Path, count: Path
) -> Iterator[Callable[[], int]]:
    command = [sys.executable, "-m", "benchmarks.aggregator.flood", str(port), kind, str(rate)]
    process = subprocess.Popen([*command, str(topics), str(count)])
    try:
        while not count.exists():
            if process.poll() is not None:
                raise RuntimeError("the flood did not start")
            time.sleep(0.02)
        yield lambda: int(count.read_text() or 0)
    finally:
        process.kill()
        process.wait(10)
