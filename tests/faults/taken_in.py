"""What a worker has taken in and not committed, seen from outside: what its death would cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aggregator.cluster.worker import WorkerParts
from aggregator.rounds.ingest import Inbox, Ingest
from aggregator.serve.uplink import Uplink
from device_sdk.link.events import Event, EventQueue, Message
from tests.faults.counters import Counters
from tests.faults.hooks import after, before

_UPDATES = (b"\x10", b"\x12")


class TakenIn:
    """Writes down when the oldest update came that this process has and did not commit: from the
    moment that its link took it from the wire. The page outlives a kill -9."""

    def __init__(self, shared: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared, self._clock = shared, clock
        self._lock = threading.Lock()
        self._came: dict[int, tuple[Message, int]] = {}  # in their order
        self._taken: list[int] = []  # out of the queue, in this turn
        self._staged: list[int] = []
        self._read = 0
        self._write()

    def watch(self) -> None:
        """In this process, from now on."""
        before(EventQueue, "put_messages", self.arrive)
        after(EventQueue, "take", self.take)
        before(Uplink, "receive", self.read)
        after(Inbox, "offer", self.offered)
        after(Ingest, "abandon", self.settled)
        after(Ingest, "commit", self.settled)
        before(WorkerParts, "turn", self.turn)

    def arrive(self, queue: object, messages: Sequence[Message]) -> None:
        now = round(1e6 * self._clock())
        with self._lock:
            for each in messages:
                if is_update(each):
                    self._came[id(each)] = each, now
            self._write()

    def take(self, events: Sequence[Event], *values: Any, **named: Any) -> None:
        self._taken.extend(id(each) for each in events if id(each) in self._came)

    def read(self, uplink: object, message: Message) -> None:
        self._read = id(message)

    def offered(self, settled: object, *values: Any, **named: Any) -> None:
        if settled is not None:
            self._done([self._read])  # answered, without a commit
        elif self._read in self._came:
            self._staged.append(self._read)

    def turn(self, parts: object) -> None:
        """What the turn before did not stage was refused, or forgotten."""
        staged = set(self._staged)
        taken, self._taken = self._taken, []
        self._done([each for each in taken if each not in staged])

    def settled(self, result: object, ingest: object) -> None:
        """Nothing is staged any more."""
        staged, self._staged = self._staged, []
        self._done(staged)

    def _done(self, messages: Sequence[int]) -> None:
        with self._lock:
            for each in messages:
                self._came.pop(each, None)
            self._write()

    def _write(self) -> None:
        oldest = next(iter(self._came.values()), None)
        self._shared.put("oldest_micros", 0 if oldest is None else oldest[1])


def is_update(message: Message) -> bool:
    """Whether there may be an update in it, or a part of one."""
    return "/up/" in message.topic and message.payload[1:2] in _UPDATES


def taken_by(counters: Path, process: int) -> Path:
    """The file of one process, beside the run's counters."""
    return counters.parent / f"taken-{process}"


def oldest_seconds(shared: Counters, at_seconds: float) -> float | None:
    """How long the oldest had been there at ``at_seconds`` of the monotonic clock; None where there
    was none."""
    micros = shared.read("oldest_micros")
    return at_seconds - micros / 1e6 if micros else None
