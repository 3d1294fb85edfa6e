"""A device of few words: speaks the protocol by the wire's own functions, and trains nothing."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.link.events import Message
from device_sdk.link.link import Link
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, decode
from device_sdk.wire.publish.catalogue import Catalogue, catalogue_id
from device_sdk.wire.publish.content import HEAD_INDEX, SHARED, open_content_head
from device_sdk.wire.publish.manifest import ChunkSet, RoundManifest, selected
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    update_digest,
    write_update,
)
from device_sdk.wire.publish.task_messages import Standing, TaskTerms, read_broadcast
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    Topics,
    UpTopic,
)
from device_sdk.wire.seal.announcement import Presence, PresenceWatch, read_announcement
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    derive_broadcast_keys,
    find_group_key,
    open_manifest,
    read_manifest_label,
)
from device_sdk.wire.seal.descriptor import Descriptor, read_descriptor
from device_sdk.wire.seal.enrolment import EnrolmentAttempt
from device_sdk.wire.seal.enrolment_message import Grant, parse_code
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening, read_no_session
from device_sdk.wire.seal.session import DeviceSessions
from device_sdk.wire.seal.signature import public_key
from tests.brokers.links import QUICK
from tests.fakes.scatter_updates import one_user
from tests.fakes.waiting import PATIENCE_SECONDS

_ANSWER_SECONDS = 5.0


class ScriptedDevice:
    """One identity with a link of its own."""

    def __init__(self, url: str, code: str, seed: int = 0, task: str = "default") -> None:
        self.code = parse_code(code)
        self.identity = Ed25519PrivateKey.generate()
        self.topics = Topics()
        self.grant: Grant | None = None
        self.sessions = DeviceSessions()
        self.group_keys: tuple[GroupKey, ...] = ()
        self.receipts: dict[bytes, Receipt] = {}
        self.manifest: RoundManifest | None = None
        self.standing: Standing | None = None
        self._url = url
        self._task = task
        self._rng = np.random.default_rng(seed)
        self._link: Link | None = None
        self._subscribed: Sequence[str] = ()
        self._retained: dict[str, bytes] = {}
        self._opening: SessionOpening | None = None
        self._presence = PresenceWatch()
        self._counter = 0
        self._epoch_wanted = 0

    # Connection.

    def __enter__(self) -> ScriptedDevice:
        return self

    def __exit__(self, *details: object) -> None:
        self.disconnect()

    def connect(self, client_id: str, topics: Sequence[str]) -> Link:
        self.disconnect()
        link = Link(
            self._url,
            rng=np.random.default_rng(1),
            clock=time.monotonic,
            client_id=client_id,
            settings=QUICK,
        )
        for topic in topics:
            link.subscribe(topic)
        link.start()
        self._link, self._subscribed = link, topics
        return link

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.stop(flush_seconds=1.0)
            self._link = None

    # Steps of the conversation.

    def enrol(self) -> ScriptedDevice:
        """Join, or join again with the same identity."""
        topics = [self.topics.write(topic) for topic in (DescriptorTopic(), PresenceTopic())]
        link = self.connect(os.urandom(16).hex(), topics)
        self.wait_for(self.knows_the_aggregator)
        attempt = EnrolmentAttempt(
            self.code, self.require_descriptor(), self.identity, self.fresh()
        )
        answer_topic = self.topics.write(EnrolAnswerTopic(attempt.mailbox))
        link = self.connect(attempt.mailbox.hex(), [answer_topic])
        link.publish(self.topics.write(EnrolRequestTopic()), attempt.message)
        self.wait_for(lambda: answer_topic in self._retained)
        self.grant = attempt.accept(self._retained.pop(answer_topic)).grant
        self.disconnect()
        return self

    def join(self) -> ScriptedDevice:
        """Connect as the device that enrolled, and open a session."""
        grant = self.require_grant()
        self.connect(
            grant.handle.hex(),
            [
                self.topics.write(DescriptorTopic()),
                self.topics.write(PresenceTopic()),
                self.topics.write(DownTopic(grant.handle)),
                self.topics.write(ManifestTopic(self._task, "all")),
            ],
        )
        self.wait_for(self.knows_the_aggregator)
        self.open_session()
        return self

    def new_opening(self) -> SessionOpening:
        """An attempt that nobody sent yet."""
        return SessionOpening(
            self.credential(), self.require_descriptor(), self.fresh(), time.monotonic
        )

    def open_session(self) -> None:
        """Ask until there is an answer, with a new attempt each time."""
        until = time.monotonic() + PATIENCE_SECONDS
        opening = None
        while opening is None or self._opening is opening:
            assert time.monotonic() < until, "no session was opened"
            opening = self._opening = self.new_opening()
            self.publish_up(opening.message)
            again = time.monotonic() + _ANSWER_SECONDS
            while self._opening is opening and time.monotonic() < again:
                self.pump(0.05)

    def take_part(self, round_number: int, body: bytes | None = None) -> Receipt:
        """Wait for a round, send an update for it, and wait for the receipt."""
        manifest = self.await_round(round_number)
        return self.send_and_wait(manifest, body if body is not None else self.body())

    def await_round(self, least: int) -> RoundManifest:
        """The manifest of round ``least`` or a later one."""
        self.wait_for(lambda: self.manifest is not None and self.manifest.round >= least)
        assert self.manifest is not None
        return self.manifest

    def fetch(self, manifest: RoundManifest) -> tuple[TaskTerms, Broadcast]:
        """The broadcast of a round."""
        key = find_group_key(self.group_keys, manifest.key_epoch)
        keys = derive_broadcast_keys(key, manifest.broadcast_id, self._task, "all")
        chunks = ChunkSet(keys, manifest.broadcast_id, manifest.chunks, manifest.length)
        self.require_link().subscribe(self.topics.chunk_filter(manifest.broadcast_id))
        for index in range(len(manifest.chunks)):
            chunks.add(self.await_retained(ChunkTopic(manifest.broadcast_id, index)))
        return read_broadcast(chunks.plaintext(), manifest)

    def fetch_content(self, content_id: bytes) -> bytes:
        """A content by its id."""
        self.require_link().subscribe(self.topics.chunk_filter(content_id))
        message = self.await_retained(ChunkTopic(content_id, HEAD_INDEX))
        label = read_manifest_label(message)
        key = find_group_key(self.group_keys, label.epoch)
        signing = public_key(self.require_descriptor().signing)
        names = ((self._task, "all"), SHARED)
        head, keys = open_content_head(message, key, names, signing)
        assert head.content_id == content_id
        chunks = ChunkSet(keys, label.broadcast_id, head.chunks, head.length)
        for index in range(len(head.chunks)):
            chunks.add(self.await_retained(ChunkTopic(content_id, index + 1)))
        return chunks.plaintext()

    def fetch_catalogue(self, manifest: RoundManifest) -> Catalogue:
        content = self.fetch_content(manifest.catalogue_id)
        assert catalogue_id(content) == manifest.catalogue_id
        return decode(Catalogue, content)

    def body(self, rows: int = 3, width: int = 8, items: int = 20) -> bytes:
        """A well-formed scatter update at random."""
        columns = np.sort(self._rng.choice(width, size=4, replace=False)).astype(np.int64)
        touched = np.sort(self._rng.choice(items, size=rows, replace=False)).astype(np.int64)
        pulls, vector = self._rng.standard_normal(rows), self._rng.standard_normal(4)
        tensors = one_user(width, touched, pulls, vector, columns)
        return encode_scatter_update(Update(1, tensors), width, "int8", self._rng)

    def identity_for(self, manifest: RoundManifest) -> UpdateIdentity:
        device_id = self.require_grant().device_id
        return UpdateIdentity(device_id, self._task, manifest.generation, manifest.round)

    def send(self, identity: UpdateIdentity, body: bytes) -> bytes:
        """Send an update once; the digest that its receipt will name."""
        payload = write_update(identity, body)
        self.publish_up(self.sessions.seal(RecordType.UPDATE, payload))
        return update_digest(identity, hashlib.sha256(body).digest())

    def send_and_wait(self, manifest: RoundManifest, body: bytes) -> Receipt:
        return self.await_receipt(self.send(self.identity_for(manifest), body))

    def await_receipt(self, digest: bytes) -> Receipt:
        self.wait_for(lambda: digest in self.receipts)
        return self.receipts.pop(digest)

    def is_selected(self, manifest: RoundManifest) -> bool:
        device_id = self.require_grant().device_id
        seed, threshold = manifest.sampling_seed, manifest.threshold
        return selected(seed, threshold, self._task, manifest.round, device_id)

    # Plumbing.

    def publish_up(self, message: bytes, *, retain: bool = False) -> None:
        grant = self.require_grant()
        topic = self.topics.write(UpTopic(grant.shard, grant.handle))
        self.require_link().publish(topic, message, retain=retain)

    def pump(self, timeout_seconds: float) -> None:
        """Handle what comes in the meantime."""
        for event in self.require_link().events(timeout_seconds=timeout_seconds):
            if isinstance(event, Message):
                self._take(event)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        again = time.monotonic() + _ANSWER_SECONDS
        while not condition():
            assert time.monotonic() < until, "the aggregator did not do what was waited for"
            if time.monotonic() >= again:
                # As devices do: a broker may have lost what was published while it subscribed them.
                again += _ANSWER_SECONDS
                for topic in self._subscribed:
                    self.require_link().subscribe(topic)
            self.pump(0.05)

    def await_retained(self, topic: ChunkTopic) -> bytes:
        name = self.topics.write(topic)
        self.wait_for(lambda: name in self._retained)
        return self._retained[name]

    def knows_the_aggregator(self) -> bool:
        """Whether descriptor and presence came."""
        presence = self.topics.write(PresenceTopic())
        return self.descriptor() is not None and presence in self._retained

    def fresh(self) -> Freshness:
        """Of a new request to the life of the aggregator that was shown last."""
        message = self._retained[self.topics.write(PresenceTopic())]
        self._counter += 1
        presence = read_announcement(Presence, message, self.require_descriptor())
        return Freshness(presence.incarnation, self._counter)

    def credential(self) -> DeviceCredential:
        grant = self.require_grant()
        return DeviceCredential(grant.device_id, self.identity, grant.admission_key)

    def descriptor(self) -> Descriptor | None:
        message = self._retained.get(self.topics.write(DescriptorTopic()))
        return None if message is None else read_descriptor(message, self.code.root_fingerprint)

    def require_descriptor(self) -> Descriptor:
        descriptor = self.descriptor()
        assert descriptor is not None
        return descriptor

    def require_grant(self) -> Grant:
        assert self.grant is not None, "not enrolled"
        return self.grant

    def require_link(self) -> Link:
        assert self._link is not None, "not connected"
        return self._link

    def _take(self, message: Message) -> None:
        topic = self.topics.parse(message.topic)
        if not isinstance(topic, DownTopic):
            self._retained[message.topic] = message.payload
        if isinstance(topic, DownTopic):
            self._take_down(message.payload)
        elif isinstance(topic, ManifestTopic):
            self._take_manifest()
        elif isinstance(topic, PresenceTopic) and self.descriptor() is not None:
            presence = read_announcement(Presence, message.payload, self.require_descriptor())
            if self._presence.should_reopen(presence) and not self.sessions.needs_session():
                self.open_session()

    def _take_down(self, payload: bytes) -> None:
        if payload[1] == 6:
            if self._opening is None:
                return
            try:
                opened = self._opening.accept(payload, 0)
            except WireError as error:
                # The reply to an opening that the aggregator's return has since replaced.
                assert error.reason == "cannot-unseal", error
                return
            self.sessions.install(opened.session)
            self._presence.session_opened(opened.incarnation)
            self.group_keys = opened.group_keys
            self._opening = None
            self._take_manifest()
            return
        if payload[1] == MessageType.NO_SESSION:
            if (
                self._opening is None
                and read_no_session(payload).session_id == self.sessions.in_use
            ):
                self.open_session()
            return
        try:
            received = self.sessions.receive(payload)
        except WireError:
            return
        if received.message_type == RecordType.STANDING:
            self.standing = decode(Standing, received.payload)
            return
        assert received.message_type == RecordType.RECEIPT
        receipt = decode(Receipt, received.payload)
        self.receipts[receipt.digest] = receipt

    def _take_manifest(self) -> None:
        message = self._retained.get(self.topics.write(ManifestTopic(self._task, "all")))
        if not message or self._opening is not None or self.sessions.needs_session():
            return
        label = read_manifest_label(message)
        try:
            key = find_group_key(self.group_keys, label.epoch)
        except WireError:
            if self._epoch_wanted < label.epoch:
                self._epoch_wanted = label.epoch
                self.open_session()
            return
        keys = derive_broadcast_keys(key, label.broadcast_id, self._task, "all")
        signing = public_key(self.require_descriptor().signing)
        manifest = decode(RoundManifest, open_manifest(message, keys, signing))
        assert (manifest.key_epoch, manifest.broadcast_id) == (label.epoch, label.broadcast_id)
        self.manifest = manifest
