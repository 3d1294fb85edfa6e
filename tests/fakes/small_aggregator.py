"""The other end, small: one process's thread, in memory, with knobs that a real one lacks."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.link.events import Message, Stopped, Subscribed
from device_sdk.link.link import Link
from device_sdk.methods.scatter.contract import decode_scatter_update
from device_sdk.wire.arrays.exchange import Attachment
from device_sdk.wire.arrays.exchange import Update as MethodUpdate
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.catalogue import Catalogue, catalogue_id
from device_sdk.wire.publish.content import ContentKind, pack_artifact, seal_content
from device_sdk.wire.publish.manifest import EVERYONE, RoundManifest, seal_chunks
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    Verdict,
    leave_digest,
    read_contribution,
    read_update,
    update_digest,
    write_receipt,
)
from device_sdk.wire.publish.report import Report
from device_sdk.wire.publish.task_messages import (
    OfferedAttachment,
    Standing,
    TaskTerms,
    write_attachment,
    write_broadcast,
)
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
    Topic,
    Topics,
    UpTopic,
)
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.announcement import ServedTasks, announce, new_presence
from device_sdk.wire.seal.broadcast import GroupKey, Publication, new_group_key, wrap_cohort_key
from device_sdk.wire.seal.descriptor import make_delegation, make_descriptor
from device_sdk.wire.seal.enrolment import EnrolmentDesk, Token
from device_sdk.wire.seal.enrolment_message import new_code, read_request_head
from device_sdk.wire.seal.keyring import Keyring, serving_keys
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session_table import RegisteredDevice, SessionTable
from tests.brokers.links import QUICK
from tests.fakes.scatter_updates import ONE_WIDTH
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until

ITEMS, WIDTH = 40, 8


@dataclass
class Knobs:
    """What a test turns."""

    receipts: bool = True
    answers_opens: bool = True
    tamper_chunk: Callable[[int, bytes], bytes] = lambda index, message: message


@dataclass
class Seen:
    """What came, in order."""

    bodies: list[tuple[UpdateIdentity, bytes]] = field(default_factory=list)
    reports: list[tuple[UpdateIdentity, Report]] = field(default_factory=list)
    farewells: int = 0
    opens: int = 0
    refused: list[str] = field(default_factory=list)


def small_catalogue(items: int = ITEMS) -> Catalogue:
    return Catalogue(
        tuple(f"film-{n}" for n in range(items)), tuple(f"Film {n}" for n in range(items))
    )


class SmallAggregator:
    """Enrols, opens sessions, publishes rounds, takes updates. Start it with ``with``."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.knobs, self.seen = Knobs(), Seen()
        self.topics = Topics()
        self._url = url
        self._delegate = Ed25519PrivateKey.generate()
        self._delegation = make_delegation(
            Ed25519PrivateKey.generate(),
            self._delegate.public_key().public_bytes_raw(),
            1,
            1000,
            int(clock()) + 10 * 365 * 86_400,
        )
        self.served: tuple[tuple[str, str], ...] | None = (("default", "all"),)
        """None: it says nothing of it, as where a broker's rules hold that back."""
        self.revision = 0
        self.standing: Standing | None = None
        """Told to every device after its session was opened; None: none of the tasks chooses."""
        self.generation = int(clock())
        self.rounds: dict[str, int] = {}
        """By task, the newest."""
        self.generations: dict[str, int] = {}
        """By task, where it has another one than ``generation``."""
        self.offset_seconds = 0
        self.catalogue = small_catalogue()
        self.catalogues: dict[str, Catalogue] = {}
        """By task, where it has another one than ``catalogue``."""
        self.artifact, self.artifact_id = b"", bytes(32)
        self.attachments: dict[str, Attachment] = {}
        self.members: dict[str, list[bytes]] = {}
        """By cohort, the admission keys of its members."""
        self.cohort_key = b"\xc0" * 32
        self.group_keys: tuple[GroupKey, ...] = (new_group_key(1),)
        self.placement_of: Callable[[bytes], Placement | None] = lambda device_id: None
        """What follows a session's reply."""
        self._tokens: dict[bytes, Token] = {}
        self._handles: dict[bytes, tuple[RegisteredDevice, bytes]] = {}
        self._verdicts: dict[bytes, Verdict] = {}
        self._counted: dict[UpdateIdentity, bytes] = {}
        self._lock = threading.RLock()
        self.methods: defaultdict[str, ScatterMethod] = defaultdict(_method)
        self.serial = 0
        self.rotate_descriptor(publish=False)
        self.forget_sessions()

    def __enter__(self) -> SmallAggregator:
        self._link = Link(
            self._url, rng=np.random.default_rng(5), clock=time.monotonic, settings=QUICK
        )
        ready = threading.Event()
        self._filters = {
            self.topics.up_filter(),
            self.topics.write(EnrolRequestTopic()),
        }
        for each in self._filters:
            self._link.subscribe(each)
        self._link.start()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_SECONDS)
        self.publish_standing()
        return self

    def __exit__(self, *details: object) -> None:
        self._link.stop(flush_seconds=1)
        self._thread.join(PATIENCE_SECONDS)

    @property
    def method(self) -> ScatterMethod:
        """Of the task ``default``."""
        return self.methods["default"]

    @method.setter
    def method(self, method: ScatterMethod) -> None:
        self.methods["default"] = method

    def use_artifact(self, files: dict[str, bytes]) -> None:
        """Publish an artifact of the aggregator's own from the next round on."""
        self.artifact = pack_artifact(files)
        self.artifact_id = hashlib.sha256(files["manifest.json"]).digest()

    def unix_seconds(self) -> float:
        return self._clock() + self.offset_seconds

    def code(self) -> str:
        now, serial = int(self.unix_seconds()), self.descriptor.serial
        code = new_code(self.descriptor.root_fingerprint, serial, now)
        self._tokens[code.token_id] = Token(code.token_id, code.secret, int(self._clock()) + 600)
        return code.to_text()

    def rotate_descriptor(self, *, publish: bool = True, lifetime_seconds: int = 3600) -> None:
        """New signing and HPKE keys under a higher serial."""
        with self._lock:
            self.serial += 1
            self._signing, sessions = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
            seed = os.urandom(hpke.SEED_BYTES)
            self.descriptor = make_descriptor(
                self._delegate,
                self._delegation,
                self.serial,
                int(self.unix_seconds()),
                int(self.unix_seconds()) + lifetime_seconds,
                self._signing.public_key().public_bytes_raw(),
                sessions.public_key().public_bytes_raw(),
                hpke.public_bytes(seed),
            )
            self._keyring = Keyring([serving_keys(self.descriptor, self._signing, sessions, seed)])
        if publish:
            self.forget_sessions()
            self.publish_standing()

    def forget_sessions(self) -> None:
        """What a restart does: all sessions are gone, and the incarnation is another."""
        with self._lock:
            self.presence = new_presence(int(self.unix_seconds()))
            self._sessions = SessionTable(
                self._keyring, self.presence.incarnation, _wide(), WorkBudget(1.0, self._clock),
                self._clock, self.unix_seconds,
            )  # fmt: skip
            self._desk = EnrolmentDesk(
                self._keyring, self.presence.incarnation, _wide(), WorkBudget(1.0, self._clock),
                self.unix_seconds,
            )  # fmt: skip

    def publish_standing(self) -> None:
        self._retain(DescriptorTopic(), self.descriptor.message)
        if self.served is not None:
            tasks = ServedTasks(self.presence.incarnation, self.revision, self.served)
            self._retain(TasksTopic(), announce(tasks, self.descriptor, self._signing))
        self._retain(PresenceTopic(), announce(self.presence, self.descriptor, self._signing))

    def rotate_group_key(self) -> None:
        self.group_keys = (*self.group_keys, new_group_key(self.group_keys[-1].epoch + 1))

    def open_round(
        self,
        *,
        deadline_seconds: float = NEVER_SECONDS,
        threshold: int = EVERYONE,
        train_seconds: float = 1.0,
        method: str = "scatter",
        task: str = "default",
        evaluation: EvaluationTerms | None = None,
    ) -> RoundManifest:
        with self._lock:
            self.rounds[task] = number = self.rounds.get(task, 0) + 1
            method_here = self.methods[task]
            broadcast = method_here.open_round(number)
            key = self.group_keys[-1]
            signing = self._signing
            catalogue = self.catalogues.get(task, self.catalogue)
            content = encode(catalogue)
            self._publish_content(
                ContentKind.CATALOGUE, catalogue_id(content), content, signing, task
            )
            if self.artifact:
                self._publish_content(
                    ContentKind.ARTIFACT, self.artifact_id, self.artifact, signing, task
                )
            publication = Publication(key, task, "all")
            terms = TaskTerms(
                method,
                "int8",
                train_seconds,
                attachments=tuple(
                    self._publish_attachment(name, each, signing, task)
                    for name, each in sorted(self.attachments.items())
                ),
                cohort_keys={
                    cohort: wrap_cohort_key(
                        self.cohort_key, keys, task, cohort, publication.broadcast_id
                    )
                    for cohort, keys in self.members.items()
                },
                evaluation=evaluation,
            )
            plaintext = write_broadcast(broadcast, terms, "float16")
            messages, digests = seal_chunks(publication, plaintext)
            now = int(self.unix_seconds())
            manifest = RoundManifest(
                root_fingerprint=self.descriptor.root_fingerprint,
                task=task,
                cohort="all",
                generation=self.generations.get(task, self.generation),
                round=number,
                version=method_here.version,
                artifact_id=self.artifact_id,
                catalogue_id=catalogue_id(content),
                broadcast_id=publication.broadcast_id,
                key_epoch=key.epoch,
                sampling_seed=os.urandom(32),
                threshold=threshold,
                opened_unix_seconds=now + min(0, int(deadline_seconds)),
                deadline_unix_seconds=now + int(deadline_seconds),
                codec="float16",
                length=len(plaintext),
                chunks=digests,
            )
            for index, message in enumerate(messages):
                sent = self.knobs.tamper_chunk(index, message)
                self._retain(ChunkTopic(publication.broadcast_id, index), sent)
            self.manifest_message = publication.seal_manifest(encode(manifest), signing)
            self._retain(ManifestTopic(task, "all"), self.manifest_message)
            self._chunks = [
                (ChunkTopic(publication.broadcast_id, index), message)
                for index, message in enumerate(messages)
            ]
            return manifest

    def mend_chunks(self) -> None:
        """Publish the chunks as they should have been."""
        for topic, message in self._chunks:
            self._retain(topic, message)

    def close_round(self) -> int:
        """The version that follows."""
        with self._lock:
            return self.method.close_round().version

    def down(self, handle: bytes, payload: bytes, *, retain: bool = False) -> None:
        self._link.publish(self.topics.write(DownTopic(handle)), payload, retain=retain)

    def tell_standing(self, handle: bytes, device_id: bytes) -> None:
        """Send ``standing`` in the device's session."""
        assert self.standing is not None
        record = encode(self.standing)
        self.down(handle, self._sessions.seal_newest(device_id, RecordType.STANDING, record))

    def tell_placement(self, handle: bytes, device_id: bytes, placement: Placement) -> None:
        """Send a placement in the device's session."""
        record = encode(placement)
        self.down(handle, self._sessions.seal_newest(device_id, RecordType.PLACEMENT, record))

    def rounds_seen(self) -> list[int]:
        """Rounds of the updates that came, each once: a busy machine may send one twice."""
        return list(dict.fromkeys(identity.round for identity, _ in self.seen.bodies))

    def await_(self, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: f"did not come true; {self.seen}", every_seconds=0.01)

    def _publish_content(
        self,
        kind: ContentKind,
        content_id: bytes,
        content: bytes,
        signing: Ed25519PrivateKey,
        task: str,
    ) -> None:
        publication = Publication(self.group_keys[-1], task, "all")
        messages = seal_content(publication, signing, kind, content_id, content)
        for index, message in enumerate(messages):
            self._retain(ChunkTopic(content_id, index), message)

    def _publish_attachment(
        self, name: str, attachment: Attachment, signing: Ed25519PrivateKey, task: str = "default"
    ) -> OfferedAttachment:
        content = write_attachment(attachment, "float16")
        content_id = hashlib.sha256(attachment.cohort.encode() + content).digest()
        key, cohort = self.group_keys[-1], "all"
        if attachment.cohort:
            key, cohort = GroupKey(key.epoch, self.cohort_key), attachment.cohort
        publication = Publication(key, task, cohort)
        kind = ContentKind.ATTACHMENT
        messages = seal_content(publication, signing, kind, content_id, content)
        for index, message in enumerate(messages):
            self._retain(ChunkTopic(content_id, index), message)
        return OfferedAttachment(name, content_id, len(content), attachment.cohort)

    def _retain(self, topic: Topic, message: bytes) -> None:
        self._link.publish(self.topics.write(topic), message, retain=True)

    def _run(self, ready: threading.Event) -> None:
        waiting = set(self._filters)
        while True:
            for event in self._link.events():
                if isinstance(event, Stopped):
                    return
                if isinstance(event, Subscribed):
                    waiting.discard(event.topic_filter)
                    if not waiting:
                        ready.set()
                if isinstance(event, Message):
                    try:
                        with self._lock:
                            self._take(event)
                    except WireError as error:
                        self.seen.refused.append(error.reason)

    def _take(self, event: Message) -> None:
        topic = self.topics.parse(event.topic)
        if isinstance(topic, EnrolRequestTopic):
            token = self._tokens[read_request_head(event.payload).token_id]
            outcome = self._desk.answer(event.payload, token)
            self._tokens[token.token_id] = outcome.token
            binding = outcome.token.binding
            if binding is not None:
                grant = binding.grant
                device = RegisteredDevice(grant.device_id, binding.identity, grant.admission_key)
                self._handles[grant.handle] = (device, grant.device_id)
            answer = self.topics.write(EnrolAnswerTopic(outcome.mailbox))
            self._link.publish(answer, outcome.answer)
            return
        assert isinstance(topic, UpTopic)
        device, device_id = self._handles[topic.handle]
        if event.payload[1] == 5:
            self.seen.opens += 1
            if self.knobs.answers_opens:
                reply = self._sessions.accept_open(device, event.payload, self.group_keys)
                self.down(topic.handle, reply)
                if self.standing is not None:
                    self.tell_standing(topic.handle, device_id)
                if (placement := self.placement_of(device_id)) is not None:
                    self.tell_placement(topic.handle, device_id, placement)
            return
        received = self._sessions.receive(event.payload, device_id)
        if received.message_type == RecordType.LEAVE:
            self.seen.farewells += 1
            if self.knobs.receipts:
                self._receipt(topic.handle, Receipt(leave_digest(device_id), Verdict.NOTED))
            return
        if received.message_type == RecordType.CONTRIBUTION:
            update = read_contribution(received.payload, device_id)
            assert update.report is not None
            self.seen.reports.append((update.identity, decode(Report, update.report)))
        else:
            assert received.message_type == RecordType.UPDATE
            update = read_update(received.payload, device_id)
        if update.body:
            self.seen.bodies.append((update.identity, update.body))
        if not self.knobs.receipts:
            return
        digest = update_digest(update.identity, update.content_sha256)
        verdict = Verdict.NOTED
        if update.body:
            verdict = self._verdict(digest, update.identity, update.body)
        self._receipt(topic.handle, Receipt(digest, verdict))

    def _receipt(self, handle: bytes, receipt: Receipt) -> None:
        device_id = self._handles[handle][1]
        sealed = self._sessions.seal(device_id, RecordType.RECEIPT, write_receipt(receipt))
        self.down(handle, sealed)

    def _verdict(self, digest: bytes, identity: UpdateIdentity, body: bytes) -> Verdict:
        if digest in self._verdicts:
            return self._verdicts[digest]
        if identity in self._counted:
            return Verdict.CONFLICT
        verdict = Verdict.COUNTED
        task = identity.task
        current = (self.generations.get(task, self.generation), self.rounds.get(task, 0))
        if (identity.generation, identity.round) != current:
            verdict = Verdict.LATE
        if verdict is Verdict.COUNTED:
            decoded: MethodUpdate = decode_scatter_update(
                body, identity.round, len(self.catalogue), WIDTH
            )
            method_here = self.methods[identity.task]
            method_here.check(decoded)
            method_here.absorb(decoded)
            self._counted[identity] = body
        self._verdicts[digest] = verdict
        return verdict


def _method() -> ScatterMethod:
    settings = ScatterSettings(least_squares=ONE_WIDTH)
    return ScatterMethod(initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(1)), settings)


def _wide() -> TokenBuckets:
    return TokenBuckets(1e6, 1e6, time.monotonic)
