"""Both ends in one thread: the real service and participants, a simulated broker and clock."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from aggregator.cli import main
from aggregator.errors import AggregatorError
from aggregator.methods.method import Binding
from aggregator.serve.assembly import World, assemble
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Service
from aggregator.store import Database, SQLiteDatabase, Store
from aggregator.store.rows import RoundRow
from aggregator.task.file import read_task
from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    EnrolRequestTopic,
    PresenceTopic,
    Topics,
    UpTopic,
)
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.world import Pace
from tests.attacks.simulated_broker import AGGREGATOR, Parcel, SimulatedBroker, StandInLink
from tests.attacks.simulated_device import SimulatedDevice
from tests.faults.fleet_home import make_fleet
from tests.faults.known import ITEMS, KnownBinding, known_body
from tests.faults.oracle import Mismatch, counted_since

ROUND_SECONDS = 60
LIVING_ROUNDS = 5
"""Once the last fault is over, and the longest wait of a device's :class:`Pace` with it, each
living device is counted within so many rounds. One may be open that the device missed, one be lost
with a session that has to be opened anew, and one with a broadcast that has to be asked for again;
the rest is for what only comes when rounds end. A device that is shut out stays so for hundreds."""
_SETTLED = 10_000
_COMMAND = r"tessera-aggregator (\w+)((?: \w+)?) --home \S+((?: --after \d+)?)"


class Stage:
    """``run`` lets simulated time pass. Everything that a test wants to disturb is an attribute.

    ``drop``: messages for which it is true vanish. ``offset_seconds`` is added to the aggregator's
    calendar clock; its clocks run ``rate`` times as fast as the world's from its next start on.
    ``database``: what opens the aggregator's file. ``binding`` and ``codec`` hold from the
    aggregator's next start on, as a changed task file does. ``hand``: what ``status`` says where
    only a person can help; ``liars``: places of devices whose updates nobody should count.
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
        self._pace = pace if pace is not None else Pace()
        lines = (
            round_lines
            or f"quorum = {devices}\ndeadline_seconds = {ROUND_SECONDS}\npause_seconds = 5"
        )
        self.fleet = make_fleet(folder, "mqtt://127.0.0.1:1", devices, lines, 5, items)
        self.broker = SimulatedBroker()
        self.judged = True
        self.hand = ""
        self.liars: set[int] = set()
        self.idle_seconds = 1.0  # how often the aggregator looks when no round is open
        self.now_seconds = 1_000.0
        self.offset_seconds = 0.0
        self.rate = self._rate = 1.0
        self._gained_seconds, self._since = 0.0, self.now_seconds
        self._began_unix = time.time() - self.now_seconds
        self.drop: Callable[[Parcel], bool] = lambda parcel: False
        self.topics = Topics()
        self._database = database
        self.binding: Binding = binding if binding is not None else KnownBinding()
        self.codec = codec
        self._lives = 0
        self.start_aggregator()
        self.devices = [
            SimulatedDevice(path, place, self.broker, self.clock, self._pace, body)
            for place, path in enumerate(self.fleet.devices)
        ]

    def clock(self) -> float:
        """Monotonic seconds of the world."""
        return self.now_seconds

    def unix(self) -> float:
        """The aggregator's calendar clock."""
        return self._began_unix + self.now_seconds + self.ahead_seconds

    @property
    def ahead_seconds(self) -> float:
        """Of that clock, beside the world's."""
        gained = self._gained_seconds + (self._rate - 1.0) * (self.now_seconds - self._since)
        return gained + self.offset_seconds

    def start_aggregator(self) -> None:
        """The aggregator's process starts, and connects."""
        self._lives += 1
        self._gained_seconds = self.ahead_seconds - self.offset_seconds
        self._since, self._rate = self.now_seconds, self.rate
        rate = self.rate
        home = self.fleet.aggregator
        task = replace(read_task(home.task_file), binding=self.binding, broadcast_codec=self.codec)
        world = World(
            lambda: rate * self.now_seconds,
            self.unix,
            np.random.default_rng(self._lives),
            sleep=lambda seconds: None,
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

    def start_as_told(self) -> None:
        """It starts; where it ends by itself, the operator runs what its words say, and starts it
        again."""
        self.start_aggregator()
        for _ in range(3):
            try:
                self.run(1.0)
            except AggregatorError as error:
                told = re.findall(_COMMAND, str(error))
                assert told, error
                for command, what, after in told:
                    assert self.command(command, *what.split(), *after.split()) == 0
                self.start_aggregator()

    def kill_aggregator(self) -> None:
        """kill -9: nothing is said or saved."""
        if not self.aggregator_alive:
            return
        self.store.database.close()
        self.broker.forget(AGGREGATOR)
        self.aggregator_alive = False

    def restart_aggregator(self) -> None:
        """kill -9, and its next life begins."""
        self.kill_aggregator()
        self.start_aggregator()

    @property
    def version(self) -> int:
        """Of the first task's model."""
        return self.parts.first.aggregation.version

    def await_version(self, version: int, seconds: float = 600.0) -> None:
        """Let time pass until the model is of a version; fails after ``seconds``."""
        self.run_until(lambda: self.version >= version, seconds)

    def next_version(self, seconds: float = 600.0) -> None:
        """Let time pass until the next version."""
        self.await_version(self.version + 1, seconds)

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
                try:
                    self.service.turn()
                except AggregatorError:
                    self.kill_aggregator()  # serve ends with these words
                    raise
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
                wait = self.idle_seconds if left is None else max(left / self._rate, 0.01)
                due = min(due, self.now_seconds + wait)
            # Never less than a hundredth: a test is not to hang on a time that does not come.
            self.now_seconds = min(until, max(due, self.now_seconds + 0.01))

    def run_until(self, true: Callable[[], bool], seconds: float = 600.0) -> None:
        """Let time pass until something is true; fails after ``seconds``."""
        until = self.now_seconds + seconds
        while not true():
            assert self.now_seconds < until, "it did not come true in time"
            self.run(self.idle_seconds)

    def closed(self) -> list[RoundRow]:
        """The first task's rounds that have ended, the newest first."""
        rows = self.store.first.rounds.latest(500)
        return [row for row in rows if not row.unfinished]

    def refused(self, place: int = 0) -> dict[str, int]:
        """What a device refused since it started, by reason."""
        return dict(self.devices[place].participant.refusals.counts())

    def incarnation(self) -> bytes:
        """Of the aggregator's present life."""
        _, message = self.parts.announcements.presence()
        return read_announcement(
            Presence, message, self.parts.keys.current().descriptor
        ).incarnation

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

    def live_on(self) -> None:
        """No more faults: what is dead starts, what was cut off connects, and no more is done.
        Clocks stay as they are. Raises :class:`Mismatch` unless each living device is counted
        within ``LIVING_ROUNDS`` that may select it, or ``hand`` is what ``status`` says, or what
        ``serve`` ends with. A device that was revoked does not live."""
        self.drop = lambda parcel: False
        words = ""
        try:
            missing = self._missing()
        except AggregatorError as error:
            missing, words = [each.place for each in self.devices], f"serve ended: {error}"
        with redirect_stdout(io.StringIO()) as said:
            self.command("status")
        words += said.getvalue()
        if self.hand and not (missing and self.hand in words):
            raise Mismatch(f"{missing} are not counted; nobody says {self.hand!r}:\n{words}")
        if missing and not self.hand:
            told = {place: self.devices[place].participant.refusals.counts() for place in missing}
            raise Mismatch(
                f"devices {missing} live and are not counted; they refused {told}; said:\n{words}"
            )

    def _missing(self) -> list[int]:
        """Places of the living that were not counted when they should have been."""
        if not self.aggregator_alive:
            self.start_aggregator()
        elif not self.link.connected:
            self.link.connect()
        rows = self.store.devices.all()
        revoked = {row.device_id for row in rows if row.revoked_unix_seconds is not None}
        living = [each for each in self.devices if each.grant.device_id not in revoked]
        for device in living:
            if not device.alive:
                device.start()
            elif not device.connected:
                device.set_connected(True)
        due = {each.place: each.grant.device_id for each in living if each.place not in self.liars}
        settings, since = self.parts.first.task.round, self.parts.first.rounds.next_number() - 1
        round_seconds = settings.deadline_seconds + settings.pause_seconds
        rounds = LIVING_ROUNDS
        if settings.share < 1.0:  # so many select a device once, but for one time in e^20
            rounds += math.ceil(-20.0 / math.log(1.0 - settings.share))
        until = self.now_seconds + self._pace.most_seconds + rounds * round_seconds
        missing = sorted(due)
        while missing and self.now_seconds < until:
            self.run(min(10.0, round_seconds))
            counted = counted_since(self.store.database, since)
            missing = [place for place in missing if due[place] not in counted]
        return missing

    def command(self, *arguments: str) -> int:
        """Run an operator's command while serving, on the aggregator's machine."""
        folder = str(self.fleet.aggregator.folder)
        with mock.patch.object(time, "time", self.unix):  # one machine has one calendar
            return main([arguments[0], "--home", folder, *arguments[1:]])

    def replace_broker(self) -> None:
        """Another broker at the same address, with nothing in it."""
        self.link.disconnect()
        self.broker.restart()
        for device in self.devices:
            device.set_connected(False)
        self.link.connect()
        for device in self.devices:
            device.set_connected(device.alive)

    def close(self) -> None:
        """End both ends' processes."""
        for device in self.devices:
            if device.alive:
                device.kill()
        if self.aggregator_alive:
            self.kill_aggregator()
