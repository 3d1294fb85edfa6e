"""What devices send: topics, sessions and envelopes, up to the plaintext of an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from aggregator.keys.enrolment import Enrolment
from aggregator.keys.registry import credential
from aggregator.rounds.ingest import Repeats
from aggregator.shared import Shared
from device_sdk.link.events import Message
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.chunks import Reassembler
from device_sdk.wire.publish.receipts import Receipt, RecordType, write_receipt
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


class Answer(NamedTuple):
    topic: str
    payload: bytes
    opened: bytes = b""
    """The device whose session it opens, if any."""


class Arrived(NamedTuple):
    """The plaintext of an update, and whose session it came in."""

    device_id: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that was refused; ``device_id`` is empty while the sender is not proven."""

    error: WireError
    device_id: bytes


class Uplink:
    """Opens what comes from the broker. ``group_keys``: what a session's reply tells."""

    def __init__(
        self,
        shared: Shared,
        table: SessionTable,
        reassembler: Reassembler,
        enrolment: Enrolment,
        repeats: Repeats,
        group_keys: Callable[[], tuple[GroupKey, ...]],
    ) -> None:
        self._topics, self._registry = shared.topics, shared.registry
        # The same topics come again and again; parsing one costs as much as a decryption.
        self._parse = lru_cache(maxsize=_MOST_TOPICS)(shared.topics.parse)
        self._table = table
        self._reassembler = reassembler
        self._enrolment = enrolment
        self._repeats = repeats
        self._group_keys = group_keys

    def receive(self, message: Message) -> Answer | Arrived | Refusal | None:
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
            device = self._registry.by_handle(topic.handle)
            if topic.shard != device.shard:
                raise WireError("wrong-topic", "the device belongs to another shard")
            if message.payload[1:2] == _SESSION_OPEN:
                known, keys = credential(device), self._group_keys()
                reply = self._table.accept_open(known, message.payload, keys)
                down = self._topics.write(DownTopic(topic.handle))
                return Answer(down, reply, device.device_id)
            if self._repeats.exhausted(device.device_id):
                raise WireError("too-many-repeats", "the device asks for old verdicts too often")
            received = self._table.receive(message.payload, device.device_id)
            device_id = device.device_id  # proven by the envelope's tag
            if received.message_type != _UPDATE:
                raise WireError("bad-type", "devices send updates, nothing else")
            payload: bytes | None = received.payload
            if received.fragment is not None:
                payload = self._reassembler.add(
                    device_id, received.message_type, received.fragment, received.payload
                )
            return None if payload is None else Arrived(device_id, payload)
        except WireError as error:
            return Refusal(error, device_id)

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

    def _enrol(self, payload: bytes) -> Answer:
        answer = self._enrolment.answer(payload)
        return Answer(self._topics.write(EnrolAnswerTopic(answer.mailbox)), answer.message)
