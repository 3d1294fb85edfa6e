"""Keeps a session open: descriptor, presence, opens and their repetitions, and when to reopen."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_sdk.home.membership import seen
from device_sdk.rounds import Actions, Publish
from device_sdk.system.clock import Backoff
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import UpTopic
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.announcement import (
    Presence,
    PresenceWatch,
    ServedTasks,
    TasksWatch,
    read_announcement,
)
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.descriptor import Descriptor, read_descriptor
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import (
    RUN_BYTES,
    DeviceCredential,
    SessionOpening,
    read_no_session,
)
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session import DeviceSessions
from device_sdk.world import DeviceWorld

_log = logging.getLogger("tessera.device")
CLASH = (
    "another machine has the identity of this device: its home was copied, and the two keep taking "
    "over each other's connection and sessions. Enrol one of them again, with a home of its own "
    "and a code from tessera-aggregator invite"
)
REVOKED = (
    "this device was revoked: it takes part no more. To come back it has to enrol again, with a "
    "home of its own and another code"
)
_MOST_DRIFT = 0.02
_FRESH_SECONDS = 60.0


class AggregatorTime:
    """What a device knows of the aggregator's time: two things that must not be mixed.

    * :meth:`now`, an estimate that rounds go by. A session's reply sets it, forwards or back, and
      this device's monotonic clock carries it on until the next; manifests correct it meanwhile.
      Nothing of it is kept: a wrong one, of either end's clock, lasts until the next reply.
    * :attr:`signed_unix_seconds`, what descriptors' expiry is judged by: the largest time that was
      signed under the descriptor in force. It is stored, rises by signed times alone, which lie
      before that descriptor's end, and begins anew with a newer descriptor. So it can never keep a
      device from the next descriptor, whatever a clock said.

    The device's own calendar is not asked: on small boards it is often wrong. ``clock``: monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float], signed_unix_seconds: int) -> None:
        self._clock = clock
        self.signed_unix_seconds = signed_unix_seconds
        self._replied_seconds = -math.inf
        self._replied_offset = 0.0
        self._offset: float | None = None

    def replied(self, unix_seconds: int) -> None:
        """A session's reply that was just asked for gave this time."""
        self._replied_seconds = self._clock()
        self._offset = self._replied_offset = unix_seconds - self._replied_seconds
        self.signed_unix_seconds = max(self.signed_unix_seconds, unix_seconds)

    def opened(self, unix_seconds: int, at_seconds: float, *, live: bool) -> None:
        """A verified manifest, newer than all before it, came at ``at_seconds``: its round had
        opened at ``unix_seconds``.

        So it was that late at least. It was no later either where the manifest is ``live``, sent
        at that moment: then a clock of this device that runs fast is corrected, by up to 2 % of
        the time since the last reply. No crystal is worse, and who shows an old manifest as if it
        were new gains no more.
        """
        self.signed_unix_seconds = max(self.signed_unix_seconds, unix_seconds)
        if self._offset is None:
            return
        least = unix_seconds - at_seconds
        if live:
            drift = _MOST_DRIFT * max(0.0, at_seconds - self._replied_seconds)
            self._offset = max(least, self._replied_offset - drift)
        else:
            self._offset = max(least, self._offset)

    def descriptor_began(self, unix_seconds: int) -> None:
        """A descriptor newer than the one in force was issued at this time."""
        self.signed_unix_seconds = unix_seconds

    @property
    def is_fresh(self) -> bool:
        """Whether a reply told the time within the last minute."""
        return self._clock() - self._replied_seconds < _FRESH_SECONDS

    def now(self) -> float | None:
        """Unix seconds, as far as this device can tell; None before the first session."""
        return None if self._offset is None else self._clock() + self._offset

    def unix_seconds(self) -> int:
        """:meth:`now`, and before the first session the largest time that was signed."""
        now = self.now()
        return self.signed_unix_seconds if now is None else int(now)

    @property
    def largest_unix_seconds(self) -> int:
        """What descriptors and their keys are judged by: the later one of both."""
        return max(self.signed_unix_seconds, self.unix_seconds())

    def clock_seconds(self, unix_seconds: float) -> float:
        """The monotonic time at which ``unix_seconds`` comes; infinite before the first session."""
        return math.inf if self._offset is None else unix_seconds - self._offset


_SENDS_AN_ATTEMPT = 3


class SessionKeeper:
    """Descriptor, presence and replies in; opens out through ``actions``.

    A session survives the loss of the broker's connection: it belongs to the two ends only. It
    stays on the shard that it was opened on: a placement holds from the next open on.
    """

    def __init__(self, world: DeviceWorld, actions: Actions) -> None:
        membership, home, clock = world.membership, world.home, world.clock
        grant = membership.grant
        self._home = home
        self._store = home.membership
        self._credential = DeviceCredential(grant.device_id, home.identity(), grant.admission_key)
        self._least_serial = membership.least_serial
        self._topics, self._handle = world.topics, grant.handle
        self.placement = replace(grant.placement, mirror=membership.mirror)
        """The newest that the aggregator told."""
        self.up_topic = self._own_topic()
        """Where what is sealed goes: the topic that the session in use was opened on."""
        self._actions = actions
        self._pace, self._clock, self._rng = world.pace, clock, world.rng
        self.root_fingerprint = membership.root_fingerprint
        """Of the root that is trusted now."""
        self.descriptor: Descriptor | None = self._store.descriptor(membership.root_fingerprint)
        """The newest one accepted."""
        self._signing: Ed25519PublicKey | None = None
        self._outdated = False  # whether an older one came, and since then nothing under ours
        self._sessions = DeviceSessions()
        self.seal, self.receive = self._sessions.seal, self._sessions.receive
        self.group_keys: tuple[GroupKey, ...] = ()
        """What the last reply brought."""
        self._watch = PresenceWatch()
        self._tasks = TasksWatch()
        self._opening: SessionOpening | None = None
        self._opening_topic = self.up_topic
        self._sends = 0
        self._connected = False
        self._next_seconds = clock()  # of the next open or repetition
        self._told_seconds = -math.inf  # until when the aggregator wants no open
        self._wanted = True
        self._answers = self._new_backoff(self._pace.answer_seconds)
        self._reopens = self._new_backoff(self._pace.reopen_seconds)
        self._renewals = self._new_backoff(self._pace.renew_seconds)
        self.time = AggregatorTime(clock, self._store.signed_time())
        self._unanswered = 0
        self._attempts = 0  # since the last reply
        self.opened = 0
        """Sessions opened since the process started."""
        self.clash = False
        """Whether another machine has this device's identity, as the aggregator said last."""
        self._revoked = False
        self._run = os.urandom(RUN_BYTES)

    @property
    def is_open(self) -> bool:
        """Whether there is a session to send under."""
        return not self._sessions.needs_session()

    @property
    def is_settled(self) -> bool:
        """Whether there is a session, and no other wanted."""
        return self.is_open and not self._wanted

    @property
    def waits_as_told(self) -> bool:
        """Whether the aggregator wants this device to come for a session later."""
        return self._clock() < self._told_seconds

    @property
    def problem(self) -> str:
        """What keeps a session from being opened, for people; empty for nothing."""
        if self._revoked:
            return REVOKED
        if self._outdated:
            return self._outdated_words()
        if self.clash:
            return CLASH
        if self.descriptor is None:
            return "no aggregator is known at this broker under this topic prefix"
        if self.time.largest_unix_seconds >= self.descriptor.expires_unix_seconds:
            return (
                "the aggregator's descriptor has expired and no newer one is at this broker: is "
                "the aggregator serving?"
            )
        if self._wanted and self._life() is None:
            return "the aggregator has not shown itself at this broker since this device came"
        if self._unanswered > _SENDS_AN_ATTEMPT:
            return (
                "the aggregator does not answer: it may be down, or this device was revoked "
                "(then it has to enrol again, in another home)"
            )
        return ""

    @property
    def served(self) -> ServedTasks | None:
        """What the aggregator of the last session serves; None where it has not said."""
        return self._tasks.of(self._watch.session, self.descriptor)

    def signing(self) -> Ed25519PublicKey:
        """The aggregator's signing key.

        Raises ``WireError``: ``no-descriptor``, or ``descriptor-expired``: keys end with it. Where
        it has expired by this device's clock alone, it asks for the time.
        """
        if self.descriptor is None:
            raise WireError("no-descriptor", "no descriptor has come yet")
        ends = self.descriptor.expires_unix_seconds
        if self.time.signed_unix_seconds < ends:
            self.ask_for_time_at(ends)  # this device's clock alone says so
        self.descriptor.require_unexpired(self.time.largest_unix_seconds)
        if self._signing is None:
            self._signing = signature.public_key(self.descriptor.signing)
        return self._signing

    def connected(self, value: bool) -> None:
        """The broker's connection came or went."""
        self._connected = value

    def on_descriptor(self, message: bytes) -> None:
        """A descriptor came. Raises ``WireError``."""
        known = self.descriptor
        if known is not None and message == known.message:
            self._outdated = False
            return
        try:
            descriptor = read_descriptor(
                message, self.root_fingerprint, seen(known), self._least_serial
            )
        except WireError as error:
            if error.reason != "serial-fell":
                raise
            self._outdated = True
            raise WireError(error.reason, self._outdated_words()) from error
        self._outdated = False
        if known is None:
            descriptor.require_unexpired(self.time.signed_unix_seconds)
        self._store.save_descriptor(descriptor)
        self.time.descriptor_began(self._store.signed_time())
        self.descriptor, self._signing = descriptor, None
        self.root_fingerprint = descriptor.root_fingerprint
        # An attempt under the old keys may never be answered.
        self._opening = None
        if self._wanted:
            self._next_seconds = self._clock()
        else:
            self.ask_for_time_at(descriptor.expires_unix_seconds)

    def on_presence(self, message: bytes, *, retained: bool) -> None:
        """A presence came. Raises ``WireError``.

        ``retained``: it lay at the broker when this device subscribed; else the aggregator has just
        shown it to the whole fleet.
        """
        if self.descriptor is None:
            raise WireError("no-descriptor", "a presence before any descriptor")
        if not self._watch.should_reopen(read_announcement(Presence, message, self.descriptor)):
            return
        if not self._wanted:
            self.reopen()
            return
        # Another life answers no open that was made for the one before.
        self._opening = None
        if self._attempts or not retained:
            now = self._clock()
            soon = now + self._reopens.next_seconds()
            self._next_seconds = min(soon, self._next_seconds) if self._next_seconds > now else soon

    def on_tasks(self, message: bytes) -> None:
        """A list of the tasks served came. Raises ``WireError``."""
        if self.descriptor is None:
            raise WireError("no-descriptor", "a list of tasks before any descriptor")
        self._tasks.take(message, self.descriptor)

    def on_reply(self, message: bytes) -> None:
        """A session's reply came. Raises ``WireError``; the right one may still come.

        Raises ``sqlite3.Error`` where its time cannot be stored: the reply is as good as lost.
        """
        if self._opening is None:
            raise WireError("unexpected-reply", "no open waits for a reply")
        try:
            opened = self._opening.accept(message, self.time.signed_unix_seconds)
        except WireError as error:
            if error.reason == "descriptor-expired":
                # Only a newer descriptor helps; ask for time again after the longest wait.
                self._opening = None
                self._next_seconds = self._clock() + self._pace.most_seconds
            raise
        self._opening, self._outdated, self._revoked = None, False, False
        self._unanswered = self._attempts = 0
        # First, since the disk may be full: then there is no session, and another open is due.
        with self._home.database.transaction():
            self._store.raise_time(opened.time_unix_seconds)
            self._home.requests.answered()
        self.time.replied(opened.time_unix_seconds)
        self._wanted = False
        self._answers.reset()
        self._sessions.install(opened.session)
        self.up_topic = self._opening_topic
        self.group_keys = opened.group_keys
        if opened.clash and not self.clash:
            _log.warning("%s", CLASH)
        self.clash = opened.clash
        self._watch.session_opened(opened.incarnation)
        self.opened += 1

    def on_no_session(self, message: bytes, left_seconds: float = math.inf) -> None:
        """The aggregator says that it does not hold a session. Where it is the one in use, all are
        dropped and another is opened when it says, or soon; each further time after a longer wait.
        ``left_seconds``: in which a session is needed, whatever it says.

        Raises ``WireError``, and nothing changes: ``unknown-session`` for any other session.
        """
        denial = read_no_session(message)
        if denial.session_id != self._sessions.in_use:
            raise WireError("unknown-session", "a denial of a session that is not in use")
        if not self._watch.may_deny(denial.incarnation):
            raise WireError("old-incarnation", "a denial by another life of the aggregator")
        self.signing()  # whether there is a descriptor, which has not expired
        assert self.descriptor is not None
        denial.verify(self._handle, self.descriptor)
        self._sessions.close()
        if self._opening is None:
            told_seconds = self._heeded(denial.wait_seconds, left_seconds)
            soon = self._clock() + max(self._renewals.next_seconds(), told_seconds)
            self._next_seconds = min(soon, self._next_seconds) if self._wanted else soon
            self._told_seconds = self._next_seconds
            self._wanted = True

    def dismissed(self) -> None:
        """The aggregator has told, in a session, that it does not know this device any more."""
        if not self._revoked:
            _log.warning("%s", REVOKED)
        self._revoked = True

    def needed_within(self, seconds: float) -> None:
        """There is something to send for so long: a wait that was told is cut to fit."""
        if self.waits_as_told:
            now = self._clock()
            self._told_seconds = now + self._heeded(self._told_seconds - now, seconds)
            self._next_seconds = min(self._told_seconds, self._next_seconds)

    def _heeded(self, wait_seconds: float, left_seconds: float) -> float:
        """The wait that the aggregator asks for, within bounds, at which devices do not all come at
        once either."""
        bound_seconds = min(self._pace.most_seconds, left_seconds / 2)
        if wait_seconds <= bound_seconds:
            return wait_seconds
        return float(self._rng.uniform(bound_seconds / 2, bound_seconds))

    def place(self, placement: Placement) -> None:
        """This device belongs there from now on. Raises ``sqlite3.Error``."""
        if placement != self.placement:
            self._store.place(placement)
            self.placement = placement

    def start_anew(self) -> None:
        """Whoever is asked next, at another broker, knows nothing of this device's sessions, nor of
        its open: the life that shows itself there is asked, once it does."""
        self._sessions.close()
        self._watch.elsewhere()
        self._attempts = 0
        self._opening, self._told_seconds = None, -math.inf
        self._wanted, self._next_seconds = True, self._clock()

    def taken_over(self) -> None:
        """The broker says that another client connected with this device's id. If another machine
        has its identity, the aggregator finds out by an open of each, the one after the other."""
        self._home.requests.leap()
        self.reopen()

    def reopen(self) -> None:
        """Open a new session after a random wait; each further one comes after a longer wait."""
        if not self._wanted:
            self._wanted = True
            self._next_seconds = self._clock() + self._reopens.next_seconds()

    def ask_for_time_at(self, unix_seconds: int) -> bool:
        """This device believes that a time has passed. Unless it was told lately what time it is,
        it asks, by opening another session; whether it asks, or has asked already."""
        if self.time.unix_seconds() < unix_seconds or self.time.is_fresh:
            return False
        self.reopen()
        return True

    def went_well(self) -> None:
        """The session proved good (a receipt came, a manifest opened): next wait is short again."""
        self._outdated = False
        self._reopens.reset()
        self._renewals.reset()

    def tick(self) -> None:
        """Do what is due."""
        if self._sessions.needs_session() and not self._wanted:
            self._wanted = True
            self._next_seconds = self._clock()
        if self._clock() < self.next_seconds():
            return
        self._told_seconds = -math.inf
        # At least half the wait: an aggregator that is merely slow should not be asked twice.
        wait = max(self._pace.answer_seconds / 2, self._answers.next_seconds())
        self._next_seconds = self._clock() + wait
        if self._opening is None or self._sends >= _SENDS_AN_ATTEMPT:
            self._opening = None
            self._opening, self._opening_topic = self._new_opening(), self._own_topic()
            self._sends = 0
        self._sends += 1
        self._unanswered += 1
        self._actions.append(Publish(self._opening_topic, self._opening.message))

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`tick` has something to do; infinite for never."""
        if not self._connected or not self._wanted:
            return math.inf
        if self.descriptor is None or self._life() is None:
            return math.inf
        return self._next_seconds

    def _outdated_words(self) -> str:
        # Above all that the delegate of the newest keys may sign: their serials may have risen
        # since this device was here.
        known = self.descriptor
        above = max(self._least_serial, 0 if known is None else known.delegation.last_serial)
        return (
            "the descriptor at this broker is older than the one that this device trusts: somebody "
            "shows an old one again, or the aggregator was restored from a backup made before its "
            "keys were rotated or renewed. If it was, run tessera-aggregator restored there, with "
            f"serve stopped, if nobody has, then tessera-aggregator rotate keys --after {above}, "
            "and start serve"
        )

    def _own_topic(self) -> str:
        return self._topics.write(UpTopic(self.placement.shard, self._handle))

    def _life(self) -> bytes | None:
        """The life of the aggregator to ask; None before any is known."""
        return self._watch.incarnation(self._attempts)

    def _new_opening(self) -> SessionOpening:
        life = self._life()
        assert self.descriptor is not None and life is not None
        freshness = Freshness(life, self._home.requests.next())
        self._attempts += 1
        return SessionOpening(
            self._credential, self.descriptor, freshness, self._clock, run=self._run
        )

    def _new_backoff(self, first_seconds: float) -> Backoff:
        return Backoff(self._rng, first_seconds=first_seconds, most_seconds=self._pace.most_seconds)
