"""Enrolment on the device: from a code to a membership, once, whatever fails on the way."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from device_sdk.errors import AlreadyEnrolled, EnrolmentFailed, EnrolmentRefused, NotEnrolled
from device_sdk.home.home import Home
from device_sdk.home.membership import Membership, seen
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Disconnected,
    Event,
    Message,
    PublishRefused,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.link.link import Link
from device_sdk.link.settings import LinkSettings
from device_sdk.system.clock import Backoff
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import (
    DescriptorTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    PresenceTopic,
    TasksTopic,
    Topics,
)
from device_sdk.wire.seal.announcement import (
    Presence,
    PresenceWatch,
    ServedTasks,
    TasksWatch,
    read_announcement,
)
from device_sdk.wire.seal.descriptor import Descriptor, read_descriptor
from device_sdk.wire.seal.enrolment import Enrolled, EnrolmentAttempt, require_current
from device_sdk.wire.seal.enrolment_message import MAILBOX_BYTES, EnrolmentCode, parse_code
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.keys import draw

# Trusting another root key, on the operator's word: for a device that cannot follow by itself.
#
# A device follows from root to root by the successions that each root signed. It cannot where
# the old root key was lost, or where whoever stole it signed a succession of his own, or after
# too many rotations. Then a fresh enrolment code says which root to trust; identity, data and
# updates stay.


def trust(home: Home, code_text: str, *, set_clock_back: bool = False) -> None:
    """Make the code's root, serial and time what this device believes; on the disk on return.

    The code is not used up: only what it says of the aggregator is taken. ``set_clock_back`` allows
    a code that was made before the time that the device believes in, which whoever held the old
    keys may have set. Raises :class:`NotEnrolled`, and :class:`EnrolmentRefused`: ``bad-code``,
    ``serial-fell`` or ``time-fell`` (an older code than the device has seen keys, or
    times, of).
    """
    membership = home.membership.load()
    if membership is None:
        raise NotEnrolled(f"the device of {home.folder} has not joined a fleet: enrol it")
    try:
        code = parse_code(code_text)
    except WireError as error:
        raise EnrolmentRefused(
            error.reason, f"the enrolment code cannot be used: {error.args[0]}"
        ) from error
    same_root = code.root_fingerprint == membership.root_fingerprint
    known = seen(home.membership.descriptor(membership.root_fingerprint)) if same_root else None
    if known is not None and code.least_serial < known.serial:
        raise EnrolmentRefused(
            "serial-fell", "the code is older than the keys this device has seen: ask for a new one"
        )
    if code.made_unix_seconds < home.membership.signed_time() and not set_clock_back:
        raise EnrolmentRefused(
            "time-fell",
            "the code was made before the time that this device believes in: ask for a new one, or "
            "set that time back (--set-clock-back) if the code is of today",
        )
    home.membership.trust(code.root_fingerprint, code.least_serial, code.made_unix_seconds)


_log = logging.getLogger(__name__)
_FINAL = {
    "code-used": "was used by another device already: ask the operator for another code",
    "code-expired": "has expired: ask the operator for another code",
    "revoked": "belongs to a device that was revoked: ask the operator for another code",
}
_OUTDATED = frozenset({"serial-fell", "descriptor-expired"})
# Not authorised, bad user or password, banned: in MQTT 5, and in 3.1.1.
_HOPELESS_CODES = frozenset({4, 5, 134, 135, 138})
_ANSWER_SECONDS = 3.0
_MOST_ANSWER_SECONDS = 30.0
_MOST_ATTEMPTS = 8
# Without a word from the network, whoever waits is told so after this long.
_SILENT_SECONDS = 1.5
# The list of tasks is published before the presence, but not every broker keeps the order.
_LIST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """Where a fleet meets: the way to its broker, and the names that its operator chose.

    ``task`` and ``cohort``: of the one task to take part in; None: no such wish.
    """

    way: BrokerWay
    prefix: str = "tessera"
    task: str | None = None
    cohort: str | None = None

    @property
    def is_wish(self) -> bool:
        """Whether a task or a cohort is named."""
        return self.task is not None or self.cohort is not None

    def names(self, served: ServedTasks | None) -> tuple[str, str] | None:
        """Task and cohort that the device knows as its own: the usual ones where it may choose.

        None where none of those served will do. Not every broker's rules let through what is
        served: then all names will do.
        """
        usual = (self.task or "default", self.cohort or "all")
        if served is None:
            return usual
        fitting = [
            (task, cohort)
            for task, cohort in served.names
            if self.task in (None, task) and self.cohort in (None, cohort)
        ]
        return usual if usual in fitting else next(iter(fitting), None)


def enrol(
    home: Home,
    fleet: FleetAddress,
    code_text: str,
    *,
    clock: Callable[[], float],
    rng: np.random.Generator,
    timeout_seconds: float,
    link_settings: LinkSettings,
) -> Membership:
    """Enrol the device of ``home``; returns once the membership is on the disk.

    The identity is made and flushed before anything is sent, so a call that failed, or a crash, is
    followed by another call with the same home and code. Raises :class:`AlreadyEnrolled`,
    :class:`EnrolmentRefused` (final for this code, but for ``not-served``),
    :class:`EnrolmentFailed` (try again), and ValueError for a URL, TLS files or names that cannot
    be used.
    """
    if home.membership.load() is not None:
        raise AlreadyEnrolled(
            f"{home.folder} is the home of an enrolled device: open it (Device.open, "
            "`tessera-device run`), or choose another home for another device"
        )
    try:
        code = parse_code(code_text)
    except WireError as error:
        raise EnrolmentRefused(
            error.reason, f"the enrolment code is mistyped: {error.args[0]}"
        ) from error
    home.identity(create=True)
    mailbox = draw(os.urandom, MAILBOX_BYTES)
    fleet.way.read()  # so that a file that cannot be used is named at once
    link = Link(fleet.way, rng=rng, clock=clock, client_id=mailbox.hex(), settings=link_settings)
    desk = _Conversation(home, fleet, code, mailbox, link, clock, rng)
    link.start()
    try:
        return desk.hold(clock() + timeout_seconds)
    finally:
        link.stop(timeout_seconds=2.0)


class _Conversation:
    """One enrolment over one link."""

    def __init__(
        self,
        home: Home,
        fleet: FleetAddress,
        code: EnrolmentCode,
        mailbox: bytes,
        link: Link,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self._home = home
        self._fleet = fleet
        self._code = code
        self._mailbox = mailbox
        self._link = link
        self._clock = clock
        self._topics = topics = Topics(fleet.prefix)
        self._descriptor_topic = topics.write(DescriptorTopic())
        self._presence_topic = topics.write(PresenceTopic())
        self._request_topic = topics.write(EnrolRequestTopic())
        self._answer_topic = topics.write(EnrolAnswerTopic(mailbox))
        self._tasks_topic = topics.write(TasksTopic())
        self._descriptor: Descriptor | None = None
        self._presence = self._tasks = b""
        self._watch, self._served = PresenceWatch(), TasksWatch()
        self._waits = Backoff(rng, first_seconds=_ANSWER_SECONDS, most_seconds=_MOST_ANSWER_SECONDS)
        self._ask_at_seconds = math.inf
        # A slow answer may be to an earlier one.
        self._attempts: deque[EnrolmentAttempt] = deque(maxlen=_MOST_ATTEMPTS)
        self._sent = 0
        self._can_hear = False
        self._send_at_seconds = 0.0
        self._names = fleet.names(None) or ("default", "all")
        self._trouble = ""
        self._told = ""
        self._until_seconds = 0.0

    def hold(self, until_seconds: float) -> Membership:
        self._until_seconds = until_seconds
        silent_seconds = self._clock() + _SILENT_SECONDS
        self._listen()
        self._link.subscribe(self._answer_topic)
        while (now := self._clock()) < until_seconds:
            # Before the answer's topic is subscribed to, the answer would be lost.
            life = self._watch.incarnation(self._sent) if self._can_hear else None
            if self._descriptor is not None and life is not None and now >= self._send_at_seconds:
                self._send_at_seconds = now + max(_ANSWER_SECONDS / 2, self._waits.next_seconds())
                self._send(self._descriptor, life)
            wait = min(until_seconds - now, max(0.05, self._send_at_seconds - now))
            if self._descriptor is None or life is None:
                # A broker of several nodes may have missed that it is asked for what it retains.
                if now >= self._ask_at_seconds:
                    self._ask_at_seconds = now + _ANSWER_SECONDS
                    self._listen()
                wait = min(until_seconds, self._ask_at_seconds) - now
            if not self._link.connected and not self._trouble:
                # A name that is looked up, or an address that swallows packets, says nothing.
                if now >= silent_seconds:
                    self._tell(
                        f"no answer yet from the broker at {self._fleet.way}: "
                        "are its name and port right, and can this machine reach it?"
                    )
                else:
                    wait = min(wait, silent_seconds - now)
            for event in self._link.events(timeout_seconds=wait):
                membership = self._take(event)
                if membership is not None:
                    return membership
        raise EnrolmentFailed(self._why())

    def _listen(self) -> None:
        # First the list, so that the names that exist have come before anything is sent.
        self._link.subscribe(self._tasks_topic, optional=True)
        self._link.subscribe(self._descriptor_topic)
        self._link.subscribe(self._presence_topic)

    def _take(self, event: Event) -> Membership | None:
        match event:
            case Connected():
                self._trouble = self._told = ""
                self._ask_at_seconds = self._clock() + _ANSWER_SECONDS
            case Message(topic, payload) if topic == self._tasks_topic:
                self._tasks = payload
                self._on_tasks()
            case Message(topic, payload) if topic == self._descriptor_topic:
                self._on_descriptor(payload)
            case Message(topic, payload) if topic == self._presence_topic:
                self._presence = payload
                self._on_presence()
            case Message(topic, payload, False) if topic == self._answer_topic:
                return self._on_answer(payload)
            case Subscribed(topic_filter) if topic_filter == self._answer_topic:
                self._can_hear = True
            case ConnectRefused(code, detail):
                if code in _HOPELESS_CODES:
                    raise EnrolmentFailed(f"the broker refused the connection: {detail}")
                self._tell(f"the broker refused the connection: {detail}")
            case Disconnected(reason, detail):
                self._can_hear, self._ask_at_seconds = False, math.inf
                if reason == "tls":
                    raise EnrolmentFailed(
                        f"the TLS connection failed ({detail}): check the CA file and the URL's "
                        "host name"
                    )
                self._tell(
                    f"the broker at {self._fleet.way} cannot be reached "
                    f"({detail}): is it running there, and is the URL right, TLS (mqtts://, "
                    "wss://) or not (mqtt://, ws://)?"
                )
            case SubscribeRefused(_, _, detail) | PublishRefused(_, _, detail):
                self._trouble = f"the broker's rules forbid enrolment: {detail}"
        return None

    def _tell(self, trouble: str) -> None:
        """Log it once, for whoever waits: it may pass, so the trying goes on."""
        self._trouble = trouble
        if trouble != self._told:
            self._told = trouble
            left = max(0.0, self._until_seconds - self._clock())
            _log.warning("%s; trying for %.0f s more", trouble, left)

    def _on_tasks(self) -> None:
        """Judge the list of tasks shown last, which may have come before its descriptor."""
        if self._descriptor is None or not self._tasks:
            return
        try:
            self._served.take(self._tasks, self._descriptor)
        except WireError:
            return  # of a fleet that was here before, perhaps: nobody has to have one
        life = self._watch.incarnation(self._sent)
        if not self._sent and self._served.of(life, self._descriptor) is not None:
            self._send_at_seconds = min(self._send_at_seconds, self._clock())

    def _require_served(self, descriptor: Descriptor, life: bytes) -> None:
        """Refuse names that this life of the aggregator does not serve, where it tells."""
        fleet, served = self._fleet, self._served.of(life, descriptor)
        names = fleet.names(served)
        if served is None or names is not None:
            self._names = names or self._names
            return
        wrong = "task" if fleet.task is None else f"task {fleet.task!r}"
        if fleet.task is None and fleet.cohort is not None:
            wrong = f"task with cohort {fleet.cohort!r}"
        elif any(task == fleet.task for task, _ in served.names):
            wrong = f"cohort {fleet.cohort!r} of the task {fleet.task!r}"
        raise EnrolmentRefused(
            "not-served",
            f"no {wrong} is served at this broker under the topic prefix {fleet.prefix!r}; there "
            f"is {served}. The code is not used up: give task and cohort as the operator named "
            "them",
        )

    def _on_descriptor(self, message: bytes) -> None:
        known = self._descriptor
        root = self._code.root_fingerprint if known is None else known.root_fingerprint
        try:
            descriptor = read_descriptor(message, root, seen(known))
            if known is not None and descriptor.digest == known.digest:
                return
            require_current(self._code, descriptor)
        except WireError as error:
            # Anybody may have put it there, so a right one can still come.
            self._trouble = _words_for(error)
            return
        self._descriptor = descriptor
        self._attempts.clear()
        self._send_at_seconds = self._clock()
        self._on_tasks()
        self._on_presence()

    def _on_presence(self) -> None:
        """Judge the presence shown last, which may have come before the descriptor it is under."""
        if self._descriptor is None or not self._presence:
            return
        try:
            presence = read_announcement(Presence, self._presence, self._descriptor)
        except WireError as error:
            self._trouble = f"the presence at this broker is not usable: {error}"
            return
        if self._watch.should_reopen(presence):
            self._send_at_seconds = now = self._clock()
            if self._served.of(presence.incarnation, self._descriptor) is None:
                self._send_at_seconds += min(_LIST_SECONDS, (self._until_seconds - now) / 2)

    def _send(self, descriptor: Descriptor, life: bytes) -> None:
        self._require_served(descriptor, life)
        # Each time another request, since none is answered twice.
        attempt = EnrolmentAttempt(
            self._code,
            descriptor,
            self._home.identity(),
            Freshness(life, self._home.requests.next()),
            random_bytes=self._random,
        )
        self._attempts.append(attempt)
        self._sent += 1
        self._link.publish(self._request_topic, attempt.message)

    def _random(self, count: int) -> bytes:
        # The mailbox names the MQTT client too, and must stay the same over attempts.
        return self._mailbox if count == MAILBOX_BYTES else os.urandom(count)

    def _on_answer(self, message: bytes) -> Membership | None:
        if self._descriptor is None:
            return None
        enrolled = self._enrolled(message)
        if enrolled is None:
            return None
        fleet = self._fleet
        membership = Membership(
            fleet.way,
            fleet.prefix,
            *self._names,
            self._descriptor.root_fingerprint,
            enrolled.grant,
            is_wish=fleet.is_wish,
        )
        with self._home.database.transaction():
            self._home.membership.save(membership, self._descriptor, enrolled.time_unix_seconds)
            self._home.requests.answered()
        saved = self._home.membership.load()
        if saved is None:
            raise NotEnrolled("the membership was not stored")
        return saved

    def _enrolled(self, message: bytes) -> Enrolled | None:
        for attempt in reversed(self._attempts):
            try:
                return attempt.accept(message)
            except WireError as error:
                if error.reason in _FINAL:
                    raise EnrolmentRefused(
                        error.reason, f"the enrolment code {_FINAL[error.reason]}"
                    ) from error
                self._trouble = f"an answer came that is none: {error}"
                if error.reason in _OUTDATED:
                    self._trouble = _words_for(error)
                    break
        return None

    def _why(self) -> str:
        if self._trouble:
            return self._trouble
        if self._descriptor is None:
            return (
                f"no aggregator is known at this broker under the topic prefix "
                f"{self._fleet.prefix!r}: is it serving, and is the prefix right?"
            )
        if not self._sent:
            return "the aggregator has not shown itself at this broker: is it serving?"
        return (
            "the aggregator did not answer: it may be down (`tessera-aggregator serve`), or the "
            "code is none of its codes. The code is not lost; try again"
        )


def _words_for(error: WireError) -> str:
    """Why a descriptor cannot be used, for people."""
    if error.reason == "wrong-root":
        return (
            "the aggregator at this broker (and topic prefix) is another one than the "
            "enrolment code was made by"
        )
    if error.reason in _OUTDATED:
        return (
            f"this broker shows an old descriptor of the aggregator ({error}). Whoever holds keys "
            "that were replaced may be behind it: nothing was sent under them. Check that the "
            "aggregator is serving at this broker, and try again"
        )
    return f"the descriptor at this broker is not usable: {error}"
