"""A device's part in rounds: each message goes to the part that it concerns."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

from device_sdk.link.broker_url import parse_broker_url
from device_sdk.rounds import Actions, MoveTo, Publish, Subscribe, Unsubscribe
from device_sdk.rounds.cell import CellChoice
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.open_round import DeviceParts
from device_sdk.rounds.sender import Sender
from device_sdk.rounds.session import SessionKeeper
from device_sdk.rounds.turns import DayBudget, Turns
from device_sdk.system.clock import Backoff
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import FIRST_ENVELOPE_TYPE, MessageType, decode
from device_sdk.wire.publish.receipts import Receipt, RecordType, leave_digest
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    ManifestTopic,
    PresenceTopic,
    SuccessorTopic,
    TasksTopic,
    Topic,
)
from device_sdk.wire.seal.announcement import ServedTasks, Successor, read_announcement
from device_sdk.wire.seal.placement import Placement
from device_sdk.world import DeviceWorld


class Roster:
    """From what the aggregator tells, and from what the owner chose.

    Served are the tasks of the aggregator's signed list, of these the ones of the device's standing
    where there is one. Until a list has come, and with an aggregator that sends none, it goes by
    what it heard last, at first the task that it was enrolled with. What is served no more is
    cleaned from the home (:meth:`device_sdk.home.home.Home.clean`).
    """

    def __init__(self, world: DeviceWorld) -> None:
        self._world, self._membership = world, world.membership
        rows = world.home.tasks.all()
        self._served = {row.name: row.cohort for row in rows if row.served}
        if not rows:
            self._served = {self._membership.task: self._membership.cohort}
        self._listed: ServedTasks | None = None
        self.standing: Standing | None = None
        """As the aggregator told it in this session."""

    @property
    def unserved(self) -> str:
        """That there is no task here for this device, for people; empty where there is one."""
        own, listed = self._membership, self._listed
        if listed is None:
            return ""
        lacking = [name for name in self._world.tasks if name not in self._served]
        if lacking:
            names = ", ".join(map(repr, lacking))
            return f"the aggregator serves no task {names} for this device; there is {listed}"
        if own.is_wish and not self._world.tasks:
            if (own.task, own.cohort) in listed.names and own.task in self._served:
                return ""
            return (
                f"the aggregator serves no task {own.task!r} with cohort {own.cohort!r}; there is "
                f"{listed}"
            )
        if self.listening():
            return ""
        return f"the aggregator serves no task for this device; there is {listed}"

    def told(self, listed: ServedTasks | None) -> None:
        """The list in force; None while none is. Raises ``sqlite3.Error``."""
        self._listed = listed
        if listed is None:
            return
        names = set(listed.names)
        if self.standing is not None:
            names &= set(self.standing.tasks)
        own = self._membership
        served: dict[str, str] = {}
        for task, cohort in sorted(names):
            if own.is_wish and task == own.task and cohort != own.cohort:
                continue
            served.setdefault(task, cohort)
        if served != self._served or not self._world.home.tasks.all():
            gone = self._served.keys() - served.keys()
            self._world.home.tasks.set_served(served)
            self._served = served
            if gone:
                self._world.home.clean()

    def listening(self) -> Mapping[str, str]:
        """Tasks to take part in, by name with their cohorts."""
        chosen = self._world.wishes()
        own = self._membership
        found = {
            task: cohort
            for task, cohort in self._served.items()
            if chosen is None or task in chosen
        }
        if own.is_wish and chosen is not None and own.task in chosen:
            found.setdefault(own.task, own.cohort)  # it may be served one day
        return found


class Farewell:
    """One record, again and again, under whatever session is open."""

    def __init__(self, world: DeviceWorld, sessions: SessionKeeper, actions: Actions) -> None:
        self._home, self._pace, self._clock = world.home, world.pace, world.clock
        self._digest = leave_digest(world.membership.grant.device_id)
        self._sessions = sessions
        self._actions = actions
        self._next_seconds = 0.0
        self._unanswered = 0
        self.done = False
        """Whether the aggregator has heard it; the home says so too."""

    def session_opened(self) -> None:
        """There is a new session: say it at once."""
        self._next_seconds, self._unanswered = 0.0, 0

    def on_receipt(self, receipt: Receipt) -> None:
        """A receipt came."""
        if receipt.digest == self._digest:
            self._home.membership.leave()
            self.done = True

    def tick(self) -> None:
        """Say it, if that is due."""
        now = self._clock()
        if now < self.next_seconds():
            return
        self._next_seconds = now + self._pace.answer_seconds
        if self._unanswered >= self._pace.unanswered_sends:
            # The aggregator may have forgotten the session: the next one comes under a new one.
            self._sessions.reopen()
            return
        self._unanswered += 1
        try:
            sealed = self._sessions.seal(RecordType.LEAVE, b"")
        except WireError:
            return  # the session has just run out: the keeper opens another
        self._actions.append(Publish(self._sessions.up_topic, sealed))

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        if self.done or not self._sessions.is_open:
            return math.inf
        return self._next_seconds


class Resubscription:
    """A granted subscription may have missed what was published while it settled.

    A broker of several nodes grants it at one of them, and the others, and what is retained, come
    to know of it one after the other. To subscribe again makes any broker send what it retains.

    That is due ``fetch_seconds`` and a random wait of up to as much after each connection; further
    ones after waits that grow to ``most_seconds``. They run by this device's connection and chance,
    and by nothing that is published: no fleet asks at once.
    """

    def __init__(self, world: DeviceWorld) -> None:
        pace = world.pace
        self._clock, self._first_seconds = world.clock, pace.fetch_seconds
        (rng,) = world.rng.spawn(1)
        self._backoff = Backoff(
            rng, first_seconds=pace.fetch_seconds, most_seconds=pace.most_seconds
        )
        self._next_seconds = math.inf

    def connected(self, value: bool) -> None:
        """The broker's connection came, and with it each subscription anew, or went."""
        self._backoff.reset()
        self._next_seconds = math.inf
        if value:
            self._wait()

    def due(self) -> bool:
        """Whether to subscribe again now; then the next time is later."""
        if self._clock() < self._next_seconds:
            return False
        self._wait()
        return True

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`due` comes true; infinite without a connection."""
        return self._next_seconds

    def _wait(self) -> None:
        self._next_seconds = self._clock() + self._first_seconds + self._backoff.next_seconds()


# Bad input, counted by reason and logged once per reason.

_log = logging.getLogger("tessera.device")


# Refused, and yet nothing is wrong: what it means to whoever reads the log.
_IN_WORDS = {
    "expired-manifest": "the round at the broker is over: this device waits for the next one",
    "old-time": "a round seems over, but this device was told the time long ago: it asks again",
    "unknown-epoch": "the fleet's key was replaced: this device asks for the new one",
}


class RefusedMessages:
    """Counts what was refused since the process started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, what: str, error: WireError) -> None:
        """Count a refused message; ``what`` says which kind it was."""
        if self._counts[error.reason] == 0:
            # Once per reason: whoever can publish could otherwise fill the disk.
            if error.reason in _IN_WORDS:
                _log.warning("%s (%s; logged once)", _IN_WORDS[error.reason], error.reason)
            else:
                _log.warning("refused a %s: %s (further ones are only counted)", what, error)
        self._counts[error.reason] += 1

    def counts(self) -> Mapping[str, int]:
        """By reason; a copy."""
        return dict(self._counts)


_SAVED_EVERY_SECONDS = 3600.0
_TAKEN = (RecordType.RECEIPT, RecordType.STANDING, RecordType.PLACEMENT)


class Participant:
    """Sans-io: messages, connections and time in; ``actions`` and training jobs out.

    Whoever runs it: passes on what the link reports, carries out ``actions``, calls :meth:`tick`
    at :meth:`next_seconds`, answers the question or trains the job of the round whose
    :meth:`turn` it is.
    Nothing here raises for bad input; it is counted in ``refusals``.
    """

    def __init__(self, world: DeviceWorld, *, leaves: bool = False) -> None:
        """``leaves``: takes part in nothing, and only says that this device leaves its fleet."""
        self._world = world
        self._topics = world.topics
        self.actions = Actions()
        self.refusals = RefusedMessages()
        self.sessions = SessionKeeper(world, self.actions)
        self.cell = CellChoice(world, self.sessions)
        self.sender = Sender(world, self.sessions, self.actions)
        self.budget = DayBudget(world, self.sessions.time)
        self.rounds: dict[str, CurrentRound] = {}
        """By task, the one in hand, and what is to be done for it."""
        self._roster = Roster(world)
        self._resubscription = Resubscription(world)
        self._turns = Turns()
        self._shared = DeviceParts(
            self.sessions, self.sender, self.actions, self._turns, self.budget
        )
        self._turn_seconds = math.inf
        self._is_connected = False
        self.farewell = Farewell(world, self.sessions, self.actions) if leaves else None
        self._early: dict[str, bytes] = {}  # what no descriptor in hand vouches for
        self._unserved = ""
        self._save_seconds = world.clock() + _SAVED_EVERY_SECONDS

    @property
    def problem(self) -> str:
        """What keeps this device from taking part, for people; empty for nothing."""
        return self.sessions.problem or self._roster.unserved or self.sender.obstacle

    def start(self) -> None:
        """Subscribe to what every device listens to."""
        self._subscribe()
        self._listen()

    def _subscribe(self) -> None:
        membership = self._world.membership
        topics: list[Topic] = [
            DescriptorTopic(),
            DownTopic(membership.grant.handle),
            PresenceTopic(),
        ]
        # First, so that it has come when the session that it is judged by is open.
        for topic in (TasksTopic(), SuccessorTopic()):
            self.actions.append(Subscribe(self._topics.write(topic), optional=True))
        self.actions.extend(Subscribe(self._topics.write(topic)) for topic in topics)

    def connected(self, value: bool, most_packet_bytes: int | None = None) -> None:
        """The broker's connection came or went; the largest packet that it takes, None for any."""
        self._is_connected = value
        self._resubscription.connected(value)
        self.sessions.connected(value)
        self.cell.connected(value)
        self.sender.connected(value and self.farewell is None, most_packet_bytes)
        for each in self.rounds.values():
            each.connected(value)

    def turn(
        self, may_begin: Callable[[CurrentRound], bool] = lambda round_: True
    ) -> CurrentRound | None:
        """The round with a question to answer, or a job to train now; None where nobody's turn has
        come. A job's training has begun with this: it must be followed by its end. ``may_begin``:
        the owner's word on each, asked first; it may end the round instead."""
        self._turn_seconds = math.inf
        rounds = [each for each in self.rounds.values() if each.question or each.job]
        able = [each for each in rounds if may_begin(each)]
        for each in able:
            if each.question is not None or (each.job is not None and each.ready is None):
                return each
        while True:
            ready = [each.ready for each in able if each.ready is not None]
            turn = self._turns.pick(ready, self._world.clock(), self.rounds.keys())
            self._turn_seconds = turn.at_seconds
            if turn.task is None:
                return None
            chosen = self.rounds[turn.task]
            if turn.gives_up:
                chosen.give_up(turn.gives_up)
            elif chosen.begin():
                return chosen

    def message(self, topic_text: str, payload: bytes, *, retained: bool) -> None:
        """A publication came."""
        what = "message"
        self.budget.count(len(payload))
        try:
            topic = self._topics.parse(topic_text)
            what = type(topic).__name__.removesuffix("Topic").lower() + " message"
            match topic:
                case ChunkTopic(content_id, index):
                    for each in [*self.rounds.values()]:
                        each.chunk(content_id, index, payload)
                case ManifestTopic(task, cohort):
                    of_task = self.rounds.get(task)
                    if of_task is not None and of_task.cohort == cohort:
                        of_task.take_manifest(payload, live=not retained)
                case DownTopic():
                    if retained:
                        raise WireError("retained", "nothing retained is accepted on this topic")
                    self._on_down(payload)
                case DescriptorTopic():
                    self.sessions.on_descriptor(payload)
                    self._retry_refused()
                case PresenceTopic():
                    self._early[topic_text] = payload
                    self.sessions.on_presence(payload, retained=retained)
                    del self._early[topic_text]
                case TasksTopic():
                    self._early[topic_text] = payload
                    self.sessions.on_tasks(payload)
                    del self._early[topic_text]
                    self._heed_tasks()
                    self.sender.hurry()  # contributions wait for it
                case SuccessorTopic():
                    self._early[topic_text] = payload
                    self._on_successor(payload)
                    del self._early[topic_text]
                case _:
                    raise WireError("bad-topic", "a topic that no device listens to")
        except WireError as error:
            self.refusals.count(what, error)

    def _on_successor(self, payload: bytes) -> None:
        descriptor = self.sessions.descriptor
        if descriptor is None:
            raise WireError("no-descriptor", "a successor before any descriptor")
        successor = read_announcement(Successor, payload, descriptor)
        try:
            if successor.url and parse_broker_url(successor.url).user is not None:
                raise ValueError("a user is none of the aggregator's to tell")
        except ValueError as error:
            raise WireError("bad-field", f"no broker's URL: {error}") from error
        self.cell.announced(successor, descriptor.serial)

    def not_mirrored(self, topic_text: str) -> None:
        """The fleet's mirror lacks the chunk that this topic retains: the broker is asked."""
        topic = self._topics.parse(topic_text)
        if isinstance(topic, ChunkTopic):
            for each in self.rounds.values():
                each.not_mirrored(topic.content_id)

    def tick(self) -> None:
        """Do what is due."""
        if self.cell.tick():
            self.connected(False)
            self.actions.append(MoveTo(self.cell.here))
        self.sessions.tick()
        self.sender.tick()
        if self.farewell is not None:
            self.farewell.tick()
        now = self._world.clock()
        if now >= self._save_seconds:
            self._save_seconds = now + _SAVED_EVERY_SECONDS
            self.budget.save()
        self._listen()
        if self._resubscription.due():
            self._ask_again()
        for each in self.rounds.values():
            try:
                each.tick()
            except WireError as error:
                self.refusals.count("manifest message", error)

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        return min(
            *(each.next_seconds() for each in self.rounds.values()),
            self._turn_seconds,
            self.sessions.next_seconds(),
            self.cell.next_seconds(),
            self._resubscription.next_seconds(),
            self.sender.next_seconds(),
            math.inf if self.farewell is None else self.farewell.next_seconds(),
            self._save_seconds,
        )

    def _on_down(self, payload: bytes) -> None:
        if len(payload) > 1 and payload[1] == MessageType.SESSION_REPLY:
            self.sessions.on_reply(payload)
            self.cell.session_opened()
            self._roster.standing = None
            self.sender.session_opened()
            if self.farewell is not None:
                self.farewell.session_opened()
            self._retry_refused()
            return
        if len(payload) > 1 and payload[1] == MessageType.NO_SESSION:
            self.sessions.on_no_session(payload, self.sender.left_seconds())
            return
        if len(payload) > 1 and payload[1] < FIRST_ENVELOPE_TYPE:
            raise WireError("bad-type", "no reply, no denial and no envelope")
        received = self.sessions.receive(payload)
        kind = received.message_type
        if received.fragment is not None or kind not in _TAKEN:
            raise WireError("bad-type", "a device takes no such record, and none in parts")
        if kind == RecordType.PLACEMENT:
            self.cell.told(decode(Placement, received.payload))
            return
        if kind == RecordType.STANDING:
            self._roster.standing = decode(Standing, received.payload)
            self._heed_tasks()
            return
        receipt = decode(Receipt, received.payload)
        self.sessions.went_well()
        row = self.sender.on_receipt(receipt)
        if self.farewell is not None:
            self.farewell.on_receipt(receipt)
        elif receipt.digest == leave_digest(self._world.membership.grant.device_id):
            self.sessions.dismissed()
        if row is not None and row.task in self.rounds:
            self.rounds[row.task].receipted()

    def _retry_refused(self) -> None:
        early, self._early = self._early, {}
        for topic_text, payload in early.items():
            self.message(topic_text, payload, retained=True)
        self._heed_tasks()
        for each in self.rounds.values():
            try:
                each.take_manifest()
            except WireError as error:
                self.refusals.count("manifest message", error)

    def _listen(self) -> None:
        """Take part in the tasks of the roster, and in no others."""
        if self.farewell is not None:
            return
        wanted = self._roster.listening()
        for name, round_ in [*self.rounds.items()]:
            if wanted.get(name) != round_.cohort:
                round_.drop()
                del self.rounds[name]
                topic = ManifestTopic(name, round_.cohort)
                self.actions.append(Unsubscribe(self._topics.write(topic)))
        for name, cohort in wanted.items():
            if name not in self.rounds:
                self.rounds[name] = CurrentRound(self._world.of_task(name, cohort), self._shared)
                self.rounds[name].connected(self._is_connected)
                self.actions.append(Subscribe(self._topics.write(ManifestTopic(name, cohort))))

    def _ask_again(self) -> None:
        """Have the broker show what is waited for: the next round, and without a session whoever
        gives one."""
        if not self.sessions.is_settled:
            self._subscribe()
        for name, round_ in self.rounds.items():
            if round_.manifest is None:
                topic = ManifestTopic(name, round_.cohort)
                self.actions.append(Subscribe(self._topics.write(topic)))

    def _heed_tasks(self) -> None:
        """What the aggregator serves may have changed; who reads the log is told, once each time
        that it leaves this device without a task."""
        self._roster.told(self.sessions.served)
        self._listen()
        before, self._unserved = self._unserved, self._roster.unserved
        if self._unserved and self._unserved != before:
            _log.warning("%s", self._unserved)
