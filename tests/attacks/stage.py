"""Both ends in one thread: the real service and participants, a simulated broker and clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from aggregator.cli import main
from aggregator.methods.method import Binding
from aggregator.serve.assembly import World, assemble
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Service
from aggregator.store import Database, SQLiteDatabase, Store
from aggregator.task.file import read_task
from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    EnrolRequestTopic,
    PresenceTopic,
    Topics,
    UpTopic,
)
from device_sdk.wire.seal.presence import read_presence
from device_sdk.world import Pace
from tests.attacks.simulated_broker import AGGREGATOR, Parcel, SimulatedBroker, StandInLink
from tests.attacks.simulated_device import SimulatedDevice
from tests.faults.fleet_home import make_fleet
from tests.faults.known import ITEMS, KnownBinding, known_body

ROUND_SECONDS = 60
_SETTLED = 10_000


class Stage:
    """``run`` lets simulated time pass. Everything that a test wants to disturb is an attribute.

    ``drop``: messages for which it is true vanish. ``offset_seconds`` is added to the aggregator's
    calendar clock. ``database``: what opens the aggregator's file. ``binding`` and ``codec`` hold
    from the aggregator's next start on, as a changed task file does.
    """

    def __init__(
        self,
        folder: Path,
        devices: int = 3,
        round_lines: str = "",
        *,
        pace: Pace | None = None,
        body: Callable[[int, int, int], bytes] = known_body,
        database: Callable[[Path], Database] = SQLiteDatabase,
        binding: Binding | None = None,
        items: int = ITEMS,
        codec: str = "float32",
    ) -> None:
        lines = (
            round_lines
            or f"quorum = {devices}\ndeadline_seconds = {ROUND_SECONDS}\npause_seconds = 5"
        )
        self.fleet = make_fleet(folder, "mqtt://127.0.0.1:1", devices, lines, 5, items)
        self.broker = SimulatedBroker()
        self.judged = True
        self.idle_seconds = 1.0  # how often the aggregator looks when no round is open
        self.now_seconds = 1_000.0
        self.offset_seconds = 0.0
        self._began_unix = time.time() - self.now_seconds
        self.drop: Callable[[Parcel], bool] = lambda parcel: False
        self.topics = Topics()
        self._database = database
        self.binding: Binding = binding if binding is not None else KnownBinding()
        self.codec = codec
        self._lives = 0
        self.start_aggregator()
        pace = pace if pace is not None else Pace()
        self.devices = [
            SimulatedDevice(path, place, self.broker, self.clock, pace, body)
            for place, path in enumerate(self.fleet.devices)
        ]

    def clock(self) -> float:
        """Monotonic seconds."""
        return self.now_seconds

    def unix(self) -> float:
        """The aggregator's calendar clock."""
        return self._began_unix + self.now_seconds + self.offset_seconds

    def start_aggregator(self) -> None:
        """The aggregator's process starts, and connects."""
        self._lives += 1
        home = self.fleet.aggregator
        task = replace(read_task(home.task_file), binding=self.binding, broadcast_codec=self.codec)
        world = World(
            self.clock, self.unix, np.random.default_rng(self._lives), sleep=lambda seconds: None
        )
        self.store = Store(self._database(home.database))
        parts = assemble(home, self.store, task, world)
        filters = (
            self.topics.write(DescriptorTopic()),
            self.topics.write(PresenceTopic()),
            self.topics.up_filter(),
            self.topics.write(EnrolRequestTopic()),
        )
        self.link = StandInLink(self.broker, filters)
        outgoing = Outgoing(self.link, self.store.retained)  # type: ignore[arg-type]
        self.parts = replace(parts, link=self.link, outgoing=outgoing)  # type: ignore[arg-type]
        self.service = Service(self.parts)
        self.link.connect()
        self.aggregator_alive = True

    def kill_aggregator(self) -> None:
        """kill -9: nothing is said or saved."""
        self.store.database.close()
        self.broker.forget(AGGREGATOR)
        self.aggregator_alive = False

    def deliver(self, parcel: Parcel) -> None:
        """Hand one message over."""
        if self.drop(parcel):
            return
        if parcel.to == AGGREGATOR:
            if self.aggregator_alive:
                self.link.deliver(parcel)
        else:
            self.devices[int(parcel.to.removeprefix("device-"))].deliver(parcel)

    def settle(self) -> None:
        """Deliver, in order, until nothing moves any more; no time passes."""
        for _ in range(_SETTLED):
            under_way, self.broker.under_way = self.broker.under_way, []
            for parcel in under_way:
                self.deliver(parcel)
            if self.aggregator_alive:
                self.service.turn()
            busy = [device.turn() for device in self.devices]
            if not under_way and not any(busy) and not self.broker.under_way:
                return
        raise AssertionError("the two ends never stop talking")

    def run(self, seconds: float) -> None:
        """All that happens within ``seconds``."""
        until = self.now_seconds + seconds
        while True:
            self.settle()
            if self.now_seconds >= until:
                return
            due = min(device.next_seconds() for device in self.devices)
            if self.aggregator_alive:
                if not self.parts.fence.passed:
                    due = min(due, self.now_seconds + 0.1)
                left = self.parts.first.rounds.seconds_left()
                due = min(
                    due, self.now_seconds + (self.idle_seconds if left is None else max(left, 0.01))
                )
            # Never less than a hundredth: a test is not to hang on a time that does not come.
            self.now_seconds = min(until, max(due, self.now_seconds + 0.01))

    def run_until(self, true: Callable[[], bool], seconds: float = 600.0) -> None:
        """Let time pass until something is true; fails after ``seconds``."""
        until = self.now_seconds + seconds
        while not true():
            assert self.now_seconds < until, "it did not come true in time"
            self.run(1.0)

    def incarnation(self) -> bytes:
        """Of the aggregator's present life."""
        _, message = self.parts.announcements.presence()
        return read_presence(message, self.parts.keys.current().descriptor).incarnation

    def refusals(self, reason: str) -> int:
        """How often the aggregator refused something for this reason since it started."""
        return self.parts.refusals.counts.get(reason, 0)

    def up_topic(self, place: int) -> str:
        """Where a device's messages go."""
        grant = self.devices[place].grant
        return self.topics.write(UpTopic(grant.shard, grant.handle))

    def sent_up(self, place: int, kind: int | None = None) -> list[bytes]:
        """Everything that was ever published on a device's topic, or of one type of message."""
        topic = self.up_topic(place)
        return [
            payload
            for at, payload in self.broker.seen
            if at == topic and (kind is None or payload[1] == kind)
        ]

    def verdict(self, place: int, number: int) -> str | None:
        """What a device was told about its update of a round."""
        part = self.devices[place].part(number)
        return None if part is None or part.verdict is None else part.verdict.value

    def command(self, *arguments: str) -> int:
        """Run an operator's command while serving."""
        folder = str(self.fleet.aggregator.folder)
        return main([arguments[0], "--home", folder, *arguments[1:]])

    def close(self) -> None:
        """End both ends' processes."""
        for device in self.devices:
            if device.alive:
                device.kill()
        if self.aggregator_alive:
            self.kill_aggregator()
