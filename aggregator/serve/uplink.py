"""What devices send: topics, sessions and envelopes, up to the plaintext of an update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from aggregator.keys.enrolment import Enrolment
from aggregator.keys.registry import credential
from aggregator.rounds.ingest import Repeats
from aggregator.shared import Shared
from aggregator.store.rows import DeviceRow
from device_sdk.link.events import Message
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    Verdict,
    leave_digest,
    write_receipt,
)
from device_sdk.wire.publish.topics import (
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    UpTopic,
)
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.session_table import SessionTable

_MOST_TOPICS = 8192
# Compared with every message: an enum's member is looked up anew each time it is named.
_SESSION_OPEN, _UPDATE = bytes((MessageType.SESSION_OPEN,)), int(RecordType.UPDATE)
_CONTRIBUTION, _LEAVE = int(RecordType.CONTRIBUTION), int(RecordType.LEAVE)
_MOST_FAREWELLS = 1024


class Answer(NamedTuple):
    topic: str
    payload: bytes
    opened: bytes = b""
    """The device whose session it opens, if any."""


class Arrived(NamedTuple):
    """The plaintext of an update or a contribution, and whose session it came in."""

    device_id: bytes
    payload: bytes
    record: int = _UPDATE


class Left(NamedTuple):
    """A device says that it leaves."""

    device_id: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that was refused; ``device_id`` is empty while the sender is not proven. ``answer``
    is what the device is told all the same, if anything; ``unknown`` the handle of a topic of which
    no device is known here."""

    error: WireError
    device_id: bytes
    answer: Answer | None = None
    unknown: bytes = b""


class Uplink:
    """Opens what comes from the broker. ``group_keys``: what a session's reply tells.
    ``enrolment`` None: others see to it."""

    def __init__(
        self,
        shared: Shared,
        table: SessionTable,
        reassembler: Reassembler,
        enrolment: Enrolment | None,
        repeats: Repeats,
        group_keys: Callable[[], tuple[GroupKey, ...]],
    ) -> None:
        self._topics, self._registry = shared.topics, shared.registry
        self._unix_clock = shared.unix_clock
        # The same topics come again and again; parsing one costs as much as a decryption.
        self._parse = lru_cache(maxsize=_MOST_TOPICS)(shared.topics.parse)
        self._table = table
        self._reassembler = reassembler
        self._enrolment = enrolment
        self._repeats = repeats
        self._group_keys = group_keys
        self._farewells: OrderedDict[bytes, Answer] = OrderedDict()

    def receive(self, message: Message) -> Answer | Arrived | Left | Refusal | None:
        """Handle one message; None when there is nothing to do yet (a part of an update)."""
        device_id = b""
        try:
            if message.retained:
                raise WireError("retained", "nobody may leave retained messages for us")
            topic = self._parse(message.topic)
            if isinstance(topic, EnrolRequestTopic):
                return self._enrol(message.payload)
            if not isinstance(topic, UpTopic):
                raise WireError("wrong-topic", "a message on a topic that is ours to write to")
            try:
                device = self._registry.sender(topic)
            except WireError as error:
                unknown = topic.handle if error.reason == "unknown-handle" else b""
                return Refusal(error, b"", self._farewells.get(topic.handle), unknown)
            if message.payload[1:2] == _SESSION_OPEN:
                known, keys = credential(device), self._group_keys()
                reply = self._table.accept_open(known, message.payload, keys)
                self._registry.saw(device.device_id, self._unix_clock())
                if self._table.take_clashed(device.device_id):
                    self._registry.clashed(device.device_id, self._unix_clock())
                down = self._topics.write(DownTopic(topic.handle))
                return Answer(down, reply, device.device_id)
            if self._repeats.exhausted(device.device_id):
                raise WireError("too-many-repeats", "the device asks for old verdicts too often")
            try:
                received = self._table.receive(message.payload, device.device_id)
            except WireError as error:
                return Refusal(error, b"", self._denial(error, device, message.payload))
            device_id = device.device_id  # proven by the envelope's tag
            self._registry.saw(device_id, self._unix_clock())
            record = received.message_type
            if record != _UPDATE and record != _CONTRIBUTION:
                if record == _LEAVE and received.fragment is None and not received.payload:
                    return Left(device_id)
                raise WireError("bad-type", "devices send updates and contributions, or leave")
            payload: bytes | None = received.payload
            if received.fragment is not None:
                payload = self._reassembler.add(
                    device_id, record, received.fragment, received.payload
                )
            return None if payload is None else Arrived(device_id, payload, record)
        except WireError as error:
            return Refusal(error, device_id)

    def _denial(self, error: WireError, device: DeviceRow, payload: bytes) -> Answer | None:
        """To an envelope of a session that is not open here."""
        if error.reason != "unknown-session":
            return None
        try:
            denial = self._table.deny(device.device_id, device.handle, payload)
        except WireError:
            return None
        return Answer(self._topics.write(DownTopic(device.handle)), denial)

    def receipt(self, device_id: bytes, receipt: Receipt) -> Answer | None:
        """A sealed receipt; None when the device is gone or has no session."""
        device = self._registry.by_id(device_id)
        if device is None:
            return None
        try:
            sealed = self._table.seal(device_id, RecordType.RECEIPT, write_receipt(receipt))
        except WireError:
            return None
        return Answer(self._topics.write(DownTopic(device.handle)), sealed)

    def farewell(self, gone: DeviceRow) -> list[tuple[str, bytes]]:
        """End the sessions of a device that was revoked, or leaves: a last receipt, with its topic,
        under one that it has.

        Kept, within bounds, and sent again whenever something comes on the topic: who leaves asks
        until it has it, and no session will tell the device from then on.
        """
        device_id, table = gone.device_id, self._table
        seal = table.seal if table.has_session(device_id) else table.seal_newest
        receipt = write_receipt(Receipt(leave_digest(device_id), Verdict.NOTED))
        try:
            sealed = seal(device_id, RecordType.RECEIPT, receipt)
        except WireError:
            return []
        finally:
            table.end(device_id)
        answer = Answer(self._topics.write(DownTopic(gone.handle)), sealed)
        self._farewells[gone.handle] = answer
        if len(self._farewells) > _MOST_FAREWELLS:
            self._farewells.popitem(last=False)
        return [answer[:2]]

    def _enrol(self, payload: bytes) -> Answer:
        if self._enrolment is None:
            raise WireError("wrong-topic", "others see to enrolments")
        answer = self._enrolment.answer(payload)
        return Answer(self._topics.write(EnrolAnswerTopic(answer.mailbox)), answer.message)
