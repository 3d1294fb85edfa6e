"""What a run says that a worker's death would cost."""

from __future__ import annotations

from pathlib import Path

from device_sdk.link.events import Message
from tests.faults.counters import Counters
from tests.faults.taken_in import TakenIn, oldest_seconds


def test_the_age_is_that_of_the_oldest_update_without_a_commit(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "taken")
    times = iter([1.0, 2.0, 3.0, 4.0])
    taken = TakenIn(counters, lambda: next(times))
    other = Message("t/up/9/x", bytes([1, 3]), False)
    refused, staged, queued = (Message(f"t/up/{n}/x", bytes([1, 16]), False) for n in range(3))

    def age() -> float | None:
        return oldest_seconds(counters, 10.0)

    taken.arrive(None, [other])
    assert age() is None
    for message in (refused, staged, queued):
        taken.arrive(None, [message])
    taken.take([other, refused, staged])
    for message, settled in ((refused, object()), (staged, None)):
        taken.read(None, message)
        taken.offered(settled)
    assert age() == 7.0, "one was answered at once"
    taken.turn(None)
    assert age() == 7.0
    taken.settled([], None)
    assert age() == 6.0
    taken.take([queued])
    taken.turn(None)
    assert age() is None
