"""What a run says that a worker's death would cost."""

from __future__ import annotations

import time
from pathlib import Path

from device_sdk.link.events import Message
from tests.faults.counters import Counters
from tests.faults.taken_in import TakenIn, oldest_seconds


def test_the_age_is_that_of_the_oldest_update_without_a_commit(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "taken")
    taken = TakenIn(counters)
    refused, staged, queued = (Message(f"t/up/{n}/x", bytes([1, 16]), False) for n in range(3))
    other = Message("t/up/9/x", bytes([1, 3]), False)

    def age() -> float | None:
        return oldest_seconds(counters, time.monotonic())

    taken.arrive(None, [other])
    assert age() is None
    times = []
    for message in (refused, staged, queued):
        times.append(time.monotonic())
        taken.arrive(None, [message])
    taken.take([other, refused, staged])
    for message, settled in ((refused, object()), (staged, None)):
        taken.read(None, message)
        taken.offered(settled)
    now = time.monotonic()
    assert 0 < (oldest_seconds(counters, now) or 0) <= now - times[0]
    taken.turn(None)
    assert 0 < (oldest_seconds(counters, now) or 0) <= now - times[1]
    taken.settled([], None)
    assert (oldest_seconds(counters, now) or 0) <= now - times[2]
    assert age()
    taken.take([queued])
    taken.turn(None)
    assert age() is None
