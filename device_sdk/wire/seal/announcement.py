"""Announcements: what the aggregator says to all, signed, and kept by the broker for who comes.

Bytes: ``version 1 | type 1 | signature 64 | body``, the body a record; signed by the signing key of
the descriptor in force, over SHA-256(descriptor) || body. There are three: which of its lives this
is (:class:`Presence`), which tasks it serves before any round was published (:class:`ServedTasks`),
and which broker takes the place of the one in use (:class:`Successor`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.fields import Key, Length, Rising
from device_sdk.wire.codec.message import (
    Count,
    MessageType,
    Record,
    Served,
    check_prefix,
    decode,
    encode,
    prefix,
)
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import INCARNATION_BYTES, Incarnation
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.signature import Purpose

MOST_TASKS = 256
MOST_REVISION = 2**63 - 1
_BODY_AT = 2 + signature.SIGNATURE_BYTES
_MOST_SHOWN = 8


class Announcement(Record):
    """A signed word to all. ``MOST_BYTES``: of its body."""

    __slots__ = ()
    TYPE: ClassVar[MessageType]
    PURPOSE: ClassVar[Purpose]


Announced = TypeVar("Announced", bound=Announcement)


def announce(said: Announcement, descriptor: Descriptor, signing: Ed25519PrivateKey) -> bytes:
    """The retained message. Published anew after a rotation: it names the descriptor in force."""
    body = encode(said)
    signed = signature.sign(signing, said.PURPOSE, descriptor.digest + body)
    return prefix(said.TYPE) + signed + body


def read_announcement(kind: type[Announced], message: bytes, descriptor: Descriptor) -> Announced:
    """Verify an announcement. Raises ``WireError``: ``bad-signature``, or a parser's reason."""
    check_prefix(message, kind.TYPE, _BODY_AT + 1, _BODY_AT + kind.MOST_BYTES)
    body = message[_BODY_AT:]
    key = signature.public_key(descriptor.signing)
    signature.verify(key, kind.PURPOSE, descriptor.digest + body, message[2:_BODY_AT])
    return decode(kind, body)


@dataclass(frozen=True)
class Presence(Announcement):
    """One life of the aggregator's process."""

    incarnation: Incarnation
    """Drawn when the process starts."""
    started_unix_seconds: Annotated[Count, Key("started")]
    """Later than that of every earlier life of the home, whatever the calendar said."""

    MOST_BYTES = 192
    TYPE = MessageType.PRESENCE
    PURPOSE = Purpose.PRESENCE


def new_presence(started_unix_seconds: int, random_bytes: RandomBytes = os.urandom) -> Presence:
    """The presence of a process that starts now."""
    return Presence(draw(random_bytes, INCARNATION_BYTES), started_unix_seconds)


@dataclass(frozen=True)
class ServedTasks(Announcement):
    """What one life of the aggregator serves."""

    incarnation: Incarnation
    """That of the life's presence."""
    revision: Count
    """Rises with each list of the same life that says something else, from 0."""
    names: Annotated[tuple[Served, ...], Length(0, MOST_TASKS), Rising(), Key("tasks")]
    """What is served, by task and then cohort."""

    MOST_BYTES = 40_960
    TYPE = MessageType.TASKS
    PURPOSE = Purpose.TASKS

    def serves(self, task: str, cohort: str) -> bool:
        """Whether the task is served to the cohort."""
        return (task, cohort) in self.names

    def __str__(self) -> str:
        """For people: what there is, and not all of a long list."""
        told = [f"task {task!r} with cohort {cohort!r}" for task, cohort in self.names]
        left = len(told) - _MOST_SHOWN
        more = f" and {left} more" if left > 0 else ""
        return (", ".join(told[:_MOST_SHOWN]) or "none") + more


@dataclass(frozen=True, slots=True)
class Successor(Announcement):
    """The fleet's next broker.

    The word alone moves nobody for good. A device looks for the aggregator there, and is there only
    where it found it, by a session; it knows the former broker until the grace is over and keys
    newer than those that signed have said the same by a session. So who shows old words, or has
    stolen the keys of one descriptor, can lead devices astray no longer than those keys hold.
    """

    revision: Count
    """Rises with each word that one descriptor's key signs; a newer descriptor's word is newer."""
    url: Annotated[str, Length(0, 512)]
    """A broker's URL without user and password; empty: the one that each device was told by its
    owner, or enrolled at."""
    until_unix_seconds: Annotated[Count, Key("until")]
    """Up to then the aggregator is heard at both brokers, and longer where no device has been at
    the new one."""

    MOST_BYTES = 960
    TYPE = MessageType.SUCCESSOR
    PURPOSE = Purpose.SUCCESSOR


class PresenceWatch:
    """Decides which life of the aggregator to ask, and whether a presence calls for a new session.

    The broker keeps old presences and may show them again. One that started before the newest seen
    calls for nothing, and one for which a session was opened already asks for no second one: a
    broker can cause one needless session for each presence the aggregator ever signed, and no loop.
    """

    _MOST_ASKED = 64

    def __init__(self) -> None:
        self.session: bytes | None = None
        """The life that answered last: no broker can show another in its place."""
        self._newest: Presence | None = None
        self._shown: Presence | None = None
        self._asked: set[bytes] = set()

    def session_opened(self, incarnation: bytes) -> None:
        """Note the incarnation that a session's reply gave."""
        self.session = incarnation

    def elsewhere(self) -> None:
        """The device goes to another broker: what was shown at the one before tells nothing of who
        is there."""
        self._newest = self._shown = None
        self._asked.clear()

    def incarnation(self, unanswered: int) -> bytes | None:
        """The life to ask, after so many attempts in a row without an answer; None for none known.

        By turns the newest, and the one shown last: the first alone would shut the device out where
        the aggregator was restored from a backup that does not know of its last lives, the second
        while somebody shows an old presence.
        """
        presence = self._shown if unanswered % 2 else self._newest
        return None if presence is None else presence.incarnation

    def may_deny(self, incarnation: bytes) -> bool:
        """Whether a life's word counts that a session is not open there: of the one that answered
        last, and of the newest. So not of one that was thought to have ended."""
        newest = None if self._newest is None else self._newest.incarnation
        return incarnation in (self.session, newest)

    def should_reopen(self, presence: Presence) -> bool:
        """Whether to open a new session (after a random wait) because of this presence."""
        self._shown = presence
        newest = self._newest
        if newest is not None and presence.started_unix_seconds < newest.started_unix_seconds:
            return False
        if newest is None or presence.started_unix_seconds > newest.started_unix_seconds:
            self._asked.clear()
        self._newest = presence
        if presence.incarnation == self.session or presence.incarnation in self._asked:
            return False
        if len(self._asked) >= self._MOST_ASKED:
            return False
        self._asked.add(presence.incarnation)
        return True


class TasksWatch:
    """Keeps the list to go by: the newest of the life shown last, under the descriptor in force.

    The broker keeps old lists and may show them again. One of the same life with a lower revision
    changes nothing. One of another life takes the place of this life's, but says nothing of this
    one: then nothing is known, as if there were no list.
    """

    def __init__(self) -> None:
        self._kept: tuple[bytes, ServedTasks] | None = None

    def take(self, message: bytes, descriptor: Descriptor) -> None:
        """A list came. Raises ``WireError``."""
        tasks = read_announcement(ServedTasks, message, descriptor)
        known = self.of(tasks.incarnation, descriptor)
        if known is None or known.revision <= tasks.revision:
            self._kept = (descriptor.digest, tasks)

    def of(self, incarnation: bytes | None, descriptor: Descriptor | None) -> ServedTasks | None:
        """What this life of the aggregator serves; None where that is not known."""
        if self._kept is None or descriptor is None:
            return None
        digest, tasks = self._kept
        is_current = (digest, tasks.incarnation) == (descriptor.digest, incarnation)
        return tasks if is_current else None
