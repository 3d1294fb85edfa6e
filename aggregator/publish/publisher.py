"""What the aggregator tells the devices of a task: contents, and each round."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.errors import AggregatorError, PacketsTooSmall
from aggregator.evaluation import serves
from aggregator.shared import TaskShared
from aggregator.store import TaskStore
from aggregator.store.facts import AttachmentBook, CohortKey, PublishedContent, SealedContent
from aggregator.store.publications import PACKET_HEAD_BYTES
from aggregator.store.rows import RoundRow
from aggregator.task.artifacts import ArtifactContent, terms_of
from aggregator.task.evaluation import metric_of
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.events import Connected, ConnectRefused, Disconnected
from device_sdk.link.link import Link
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.arrays.tensors import Codec, encode_tensors, require_encodable
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.catalogue import NO_CATALOGUE, catalogue_id
from device_sdk.wire.publish.content import SHARED, ContentKind, seal_content
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    RoundManifest,
    seal_chunks,
)
from device_sdk.wire.publish.task_messages import (
    OfferedAttachment,
    write_attachment,
    write_broadcast,
)
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    ManifestTopic,
    PresenceTopic,
    SuccessorTopic,
    TasksTopic,
    Topics,
)
from device_sdk.wire.seal.announcement import Presence, ServedTasks, Successor, announce
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    Publication,
    derive_broadcast_keys,
    find_group_key,
    new_group_key,
    open_manifest,
    read_manifest_label,
    wrap_cohort_key,
)
from device_sdk.wire.seal.keyring import ServingKeys
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES

# What the aggregator tells everybody at all times: descriptor, tasks and presence, and where the
# fleet moves to.


class Announcements:
    """``names`` gives task and cohort of each task that is served, ``keys`` the serving keys of the
    descriptor in force; ``successor``: the broker that the fleet moves to, if any."""

    def __init__(
        self,
        topics: Topics,
        life: Presence,
        names: Callable[[], Iterable[tuple[str, str]]],
        keys: Callable[[], ServingKeys],
        successor: Successor | None = None,
    ) -> None:
        self._topics = topics
        self._life = life
        self._names = names
        self._keys = keys
        self._successor = successor
        self._served = ServedTasks(life.incarnation, 0, tuple(sorted(names())))

    def standing(self) -> list[tuple[str, bytes]]:
        """Topics and messages of all of them."""
        descriptor = self._keys().descriptor.message
        found = [(self._topics.write(DescriptorTopic()), descriptor), self.tasks(), self.presence()]
        if self._successor is not None:
            found.append(self._word_of_successor(self._successor))
        return found

    def _word_of_successor(self, successor: Successor) -> tuple[str, bytes]:
        keys = self._keys()
        message = announce(successor, keys.descriptor, keys.signing)
        return self._topics.write(SuccessorTopic()), message

    def tasks(self) -> tuple[str, bytes]:
        """Topic and message of the tasks served: sent before the presence, on which devices act."""
        self.names_changed()
        keys = self._keys()
        message = announce(self._served, keys.descriptor, keys.signing)
        return self._topics.write(TasksTopic()), message

    def names_changed(self) -> bool:
        """Look again which tasks are served; whether they are others."""
        names = tuple(sorted(self._names()))
        if names == self._served.names:
            return False
        before = self._served
        self._served = ServedTasks(before.incarnation, before.revision + 1, names)
        return True

    def presence(self) -> tuple[str, bytes]:
        keys = self._keys()
        message = announce(self._life, keys.descriptor, keys.signing)
        return self._topics.write(PresenceTopic()), message


_NAME_BYTES = 34
"""Of a chunk, in what names all of them."""
_BESIDE_NAMES_BYTES = 640
_ANOTHER_TRY = ("no-connack", "version")
"""Why a connection ended that is made again at once, as one of an older MQTT."""


# What a broker's largest packet makes of a task's messages, asked before any round.


class Unasked(AggregatorError):
    """A broker that cannot be asked; it says why."""


def largest_packet(
    way: BrokerWay,
    proxy: str | None,
    rng: np.random.Generator,
    clock: Callable[[], float],
    seconds: float = 3.0,
) -> int | None:
    """What the broker says when it accepts a connection; None: it names no limit.

    ``clock``: monotonic seconds. Raises Unasked where it cannot be asked within so many
    ``seconds``.
    """
    settings = replace(LinkSettings(), proxy=proxy, connect_timeout_seconds=seconds)
    try:
        link = Link(way, rng=rng, clock=clock, settings=settings)
    except ValueError as error:
        raise Unasked(str(error)) from None
    until, problem = clock() + seconds, f"no answer within {seconds:g} s"
    link.start()
    try:
        while (left := until - clock()) > 0:
            for event in link.events(timeout_seconds=left):
                if isinstance(event, Connected):
                    return event.limits.maximum_packet_bytes
                if isinstance(event, ConnectRefused):
                    raise Unasked(event.detail)
                if isinstance(event, Disconnected):
                    problem = event.detail
                    if event.reason not in _ANOTHER_TRY:
                        raise Unasked(problem)
        raise Unasked(problem)
    finally:
        link.stop()


def packet_words(packet_bytes: int | None, sizes: Mapping[str, int]) -> str:
    """How a task's messages go through a broker that takes such packets; None: any of ours.

    ``sizes``: in bytes, of ``broadcast`` and ``update`` and of what else is published. Raises
    PacketsTooSmall where one of them cannot.
    """
    room = Room(packet_bytes)
    chunk = room.chunk_bytes
    for what, size in sizes.items():
        if what != "update":
            names = -(-size // chunk) * _NAME_BYTES + _BESIDE_NAMES_BYTES
            room.require(f"the task's {what}", [("", bytes(names))])
    most = MAX_MESSAGE_BYTES if packet_bytes is None else min(packet_bytes, MAX_MESSAGE_BYTES)
    down, up = sizes.get("broadcast", 0), sizes.get("update", 0)
    takes = (
        "names no largest packet"
        if packet_bytes is None
        else f"takes packets of at most {packet_bytes:,} bytes"
    )
    told = [f"contents go down in chunks of at most {chunk:,} bytes"]
    told += [f"a round's {down:,} in {_count(down, chunk, 'chunk')}"] if down else []
    told += [f"an update's {up:,} up in {_count(up, most, 'message')}"] if up else []
    return f"{takes}: {', '.join(told)}"


def _count(size: int, most: int, what: str) -> str:
    count = -(-size // most)
    return f"{count:,} {what}{'s' * (count != 1)}"


def packet_lines(
    ways: Sequence[BrokerWay],
    sizes: Mapping[str, int],
    ask: Callable[[BrokerWay], int | None],
    known: int | None,
) -> list[str]:
    """For people, of each broker that devices may be at. ``known``: what serve has found.

    Raises PacketsTooSmall as :func:`packet_words` does.
    """
    lines = []
    for way in ways:
        try:
            lines.append(f"the broker {way} {packet_words(ask(way), sizes)}")
        except Unasked as error:
            found = "" if known is None else f"; as serve found it, it {packet_words(known, sizes)}"
            lines.append(
                f"not checked: the largest packet that the broker {way} takes ({error}); it must "
                f"be {LEAST_PACKET_BYTES:,} bytes at least{found}"
            )
    return lines


# How what is published is cut so that the broker takes it.

_CHUNK_AROUND_BYTES = 54
"""Head and tag of a chunk."""
_TOPIC_BYTES = 128
LEAST_PACKET_BYTES = 6144
"""Sessions, enrolments and the descriptor take up to 4,096 bytes each, and their topics."""


@dataclass(frozen=True)
class Room:
    """What the broker's largest packet has room for; ``packet_bytes`` None: any message of ours."""

    packet_bytes: int | None

    @property
    def chunk_bytes(self) -> int:
        """Plaintext bytes of each chunk. Raises PacketsTooSmall where nothing can be sent."""
        if self.packet_bytes is None:
            return CHUNK_BYTES
        if self.packet_bytes < LEAST_PACKET_BYTES:
            raise PacketsTooSmall(
                f"the broker takes packets of at most {self.packet_bytes:,} bytes, and a session "
                f"needs {LEAST_PACKET_BYTES:,}: raise its limit (Mosquitto: max_packet_size)"
            )
        around = PACKET_HEAD_BYTES + _TOPIC_BYTES + _CHUNK_AROUND_BYTES
        return min(CHUNK_BYTES, self.packet_bytes - around)

    def require(self, what: str, messages: Iterable[tuple[str, bytes]]) -> None:
        """Raises PacketsTooSmall where one of them, with its topic, does not fit."""
        most = self.packet_bytes
        if most is None:
            return
        sizes = (PACKET_HEAD_BYTES + len(topic) + len(each) for topic, each in messages)
        largest = max(sizes, default=0)
        if largest > most:
            raise PacketsTooSmall(
                f"the broker takes packets of at most {most:,} bytes, and {what} has one of "
                f"{largest:,}, which names its chunks: raise the broker's limit (Mosquitto: "
                "max_packet_size), or make the model smaller"
            )


# Attachments of a round's broadcast, sealed as contents of their own, once for as long as they
# stay the same.

_KEY_BYTES = 32
_TELLING_VERSIONS = 10
"""So many of the newest may tell what devices predict with."""
ATTACHMENT_PART = "attachment."
"""What the parts of attachments begin with, among the store's publications."""


@dataclass(frozen=True)
class SealedOffer:
    """What the round's terms say of attachments."""

    attachments: tuple[OfferedAttachment, ...] = ()
    cohort_keys: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Attachments:
    """Seals into the store's publications; to be used inside the transaction that opens a round.

    ``admission_key`` gives a device's, by its id in hexadecimal; None for one that is revoked or
    unknown. ``cohort``: whom the task's publications are for. ``codec``: a key of
    ``BROADCAST_CODECS``.
    """

    task: str
    cohort: str
    codec: str
    topics: Topics
    store: TaskStore
    admission_key: Callable[[str], bytes | None]
    random_bytes: RandomBytes
    rng: np.random.Generator

    def seal(
        self, broadcast: Broadcast, broadcast_id: bytes, key: GroupKey, signing: Ed25519PrivateKey
    ) -> SealedOffer:
        """Seal what is new or has other readers, and have what is gone cleared from the broker.

        Raises ValueError for arrays that the codec cannot carry.
        """
        book = self.store.facts.attachments
        if book is None:
            if not broadcast.attachments:
                return SealedOffer()
            book = AttachmentBook(draw(self.random_bytes, _KEY_BYTES))
        members = {name: self._members(each) for name, each in broadcast.cohorts.items()}
        cohorts = {
            name: self._cohort_key(book.cohorts.get(name), keys, key.epoch)
            for name, keys in members.items()
        }
        signer = signing.public_key().public_bytes_raw().hex()
        sealed: dict[str, SealedContent] = {}
        offers = []
        for name, attachment in sorted(broadcast.attachments.items()):
            cohort = cohorts.get(attachment.cohort)
            chunk_bytes = self._room().chunk_bytes
            under = f"{key.epoch} {signer} {'' if cohort is None else cohort.drawn_for}"
            under += f" {chunk_bytes}"
            content_id = self._content_id(book.secret, attachment)
            known = sealed.get(content_id.hex()) or book.sealed.get(content_id.hex())
            if known is None or known.sealed_under != under:
                publication = self._publication(key, attachment.cohort, cohort)
                size = self._publish(content_id, attachment, publication, signing)
                known = SealedContent(size, under)
            sealed[content_id.hex()] = known
            offers.append(OfferedAttachment(name, content_id, known.size, attachment.cohort))
        for gone in book.sealed.keys() - sealed.keys():
            self.store.publications.replace(ATTACHMENT_PART + gone, [])
        self.store.facts.attachments = AttachmentBook(book.secret, cohorts, sealed)
        wrapped = {
            name: wrap_cohort_key(cohort.key, members[name].values(), self.task, name, broadcast_id)
            for name, cohort in cohorts.items()
        }
        return SealedOffer(tuple(offers), wrapped)

    def _members(self, senders: tuple[str, ...]) -> dict[str, bytes]:
        found = {sender: self.admission_key(sender) for sender in sorted(senders)}
        return {sender: key for sender, key in found.items() if key is not None}

    def _cohort_key(
        self, known: CohortKey | None, members: Mapping[str, bytes], epoch: int
    ) -> CohortKey:
        """The same for as long as members and epoch are: who has left reads nothing new."""
        named = hashlib.sha256("".join(members).encode()).hexdigest()
        drawn_for = f"{epoch} {named}"
        if known is not None and known.drawn_for == drawn_for:
            return known
        return CohortKey(draw(self.random_bytes, _KEY_BYTES), drawn_for)

    def _content_id(self, secret: bytes, attachment: Attachment) -> bytes:
        """Of the exact arrays, whatever the codec makes of them, and of who may read them.

        Keyed: the id stands in topics, where a plain hash would let the broker test guesses.
        """
        exact = encode_tensors(attachment.tensors, Codec.FLOAT32)
        label = f"tessera/1 attachment {self.codec} {attachment.cohort}".encode()
        return hmac.digest(secret, label + b"\x00" + exact, hashlib.sha256)

    def _publication(self, key: GroupKey, name: str, cohort: CohortKey | None) -> Publication:
        if cohort is None:
            return Publication(key, self.task, self.cohort, self.random_bytes)
        return Publication(GroupKey(key.epoch, cohort.key), self.task, name, self.random_bytes)

    def _publish(
        self,
        content_id: bytes,
        attachment: Attachment,
        publication: Publication,
        signing: Ed25519PrivateKey,
    ) -> int:
        content = write_attachment(attachment, self.codec, self.rng)
        room = self._room()
        sealed = seal_content(
            *(publication, signing, ContentKind.ATTACHMENT, content_id, content, room.chunk_bytes)
        )
        messages = [
            (self.topics.write(ChunkTopic(content_id, index)), message)
            for index, message in enumerate(sealed)
        ]
        room.require("an attachment", messages)
        self.store.publications.replace(ATTACHMENT_PART + content_id.hex(), messages)
        return len(content)

    def _room(self) -> Room:
        return Room(self.store.fleet.facts.packet_bytes)


_ROUND_PART = "round"


class Publisher:
    """Seals publications and stores them, so that they can be sent again after any crash.

    ``artifacts``: of the task, smallest first. ``keys`` gives the serving keys of the descriptor in
    force.
    """

    def __init__(
        self,
        shared: TaskShared,
        artifacts: tuple[ArtifactContent, ...],
        keys: Callable[[], ServingKeys],
        rng: np.random.Generator,
    ) -> None:
        task, store, topics = shared.task, shared.store, shared.topics
        self._task, self._store, self._topics = task, store, topics
        self._random_bytes = shared.random_bytes
        self._artifacts = artifacts
        self._keys = keys
        self._rng = rng
        self._terms = terms_of(task, artifacts)
        self._attachments = Attachments(
            task.name,
            task.cohort,
            task.broadcast_codec,
            topics,
            store,
            shared.registry.admission_key,
            shared.random_bytes,
            rng,
        )

    def _predicts(self) -> Literal["", "global", "personal"]:
        """Which model devices are to predict with: by the newest figures that tell."""
        settings, since = self._task.evaluation, self._store.facts.replaced_at
        if settings is None or self._task.binding.needs_catalogue:
            return ""
        metric = metric_of(settings.ranking)
        latest = self._store.evaluations.latest(_TELLING_VERSIONS)
        told = (serves(each.figures, metric) for each in latest if each.version >= since)
        return next((each for each in told if each), "")

    def offers(self, artifacts: Iterable[ArtifactContent]) -> bool:
        """Whether these are the task's artifacts and companions, in this order."""

        def ids(of: Iterable[ArtifactContent]) -> list[bytes]:
            pairs = ((each, each.companion) for each in of)
            return [one.artifact_id for pair in pairs for one in pair if one is not None]

        return ids(artifacts) == ids(self._artifacts)

    def require_publishable(self, broadcast: Broadcast) -> None:
        """Raises AggregatorError where no codec carries the broadcast's values."""
        try:
            require_encodable(broadcast.tensors)
            for attachment in broadcast.attachments.values():
                require_encodable(attachment.tensors)
        except ValueError as error:
            raise _unsendable(error) from None

    def seal_round(self, row: RoundRow, broadcast: Broadcast) -> None:
        """Store a round's publication; called inside the transaction that opens the round.

        The group key is replaced first where that is due, and contents are sealed anew with it.
        """
        key = self._current_key()
        serving = self._keys()
        signing = serving.signing
        catalogue = None if self._task.catalogue is None else self._store.facts.catalogue
        room = Room(self._store.fleet.facts.packet_bytes)
        self._seal_contents(key, signing, catalogue, room)
        self._drop_keys(key)
        publication = self._publication(key)
        if row.threshold == 0:
            lasting = {name: each for name, each in broadcast.attachments.items() if each.lasting}
            # Nobody trains any more.
            broadcast = replace(broadcast, attachments=lasting, cohorts={})
        try:
            offer = self._attachments.seal(broadcast, publication.broadcast_id, key, signing)
            terms = replace(
                self._terms,
                attachments=offer.attachments,
                cohort_keys=offer.cohort_keys,
                predicts=self._predicts(),
            )
            plaintext = write_broadcast(broadcast, terms, self._task.broadcast_codec, self._rng)
        except ValueError as error:
            raise _unsendable(error) from None
        chunks, digests = seal_chunks(publication, plaintext, room.chunk_bytes)
        manifest = RoundManifest(
            root_fingerprint=serving.descriptor.root_fingerprint,
            task=self._task.name,
            cohort=self._task.cohort,
            generation=row.generation,
            round=row.round,
            version=broadcast.version,
            artifact_id=self._artifacts[0].artifact_id if self._artifacts else bytes(32),
            catalogue_id=NO_CATALOGUE if catalogue is None else catalogue_id(catalogue),
            broadcast_id=publication.broadcast_id,
            key_epoch=key.epoch,
            sampling_seed=row.seed,
            threshold=row.threshold,
            opened_unix_seconds=int(row.opened_unix_seconds),
            deadline_unix_seconds=int(self._useful_until(row)),
            codec=self._task.broadcast_codec,
            length=len(plaintext),
            chunks=digests,
        )
        messages = [
            (self._topics.write(ChunkTopic(publication.broadcast_id, index)), chunk)
            for index, chunk in enumerate(chunks)
        ]
        # Last, so that whoever sees it finds what it names.
        sealed = publication.seal_manifest(encode(manifest), signing)
        topic = self._topics.write(ManifestTopic(self._task.name, self._task.cohort))
        messages.append((topic, sealed))
        room.require("the round's broadcast", messages)
        self._store.publications.replace(_ROUND_PART, messages)

    @property
    def is_readable(self) -> bool:
        """Whether a device that comes now believes the newest round's publication, if there is one:
        the keys in force signed it."""
        topic = self._topics.write(ManifestTopic(self._task.name, self._task.cohort))
        fleet = self._store.fleet
        message = fleet.retained.message(topic)
        if message is None:
            return True
        try:
            label = read_manifest_label(message)
            key = find_group_key(fleet.secrets.group_keys(), label.epoch)
            names = self._task.name, self._task.cohort
            keys = derive_broadcast_keys(key, label.broadcast_id, *names)
            open_manifest(message, keys, self._keys().signing.public_key())
        except WireError:
            return False
        return True

    def withdraw_round(self) -> None:
        """The newest round's publication is to be cleared; inside a transaction."""
        self._store.publications.replace(_ROUND_PART, [])

    def _useful_until(self, row: RoundRow) -> float:
        """When an update of the round counts no more, for sure: where late ones do, devices finish
        what they began though the round is over."""
        if not row.threshold:
            return row.deadline_unix_seconds
        return row.opened_unix_seconds + self._task.round.useful_seconds

    def _current_key(self) -> GroupKey:
        fleet = self._store.fleet
        keys = fleet.secrets.group_keys()
        key = keys[-1]
        if fleet.facts.rotation_due:
            key = new_group_key(key.epoch + 1, self._random_bytes)
            fleet.secrets.add_group_key(key)
            fleet.facts.rotation_due = False
        self._store.facts.key_epoch = key.epoch
        return key

    def _drop_keys(self, current: GroupKey) -> None:
        # What other tasks published stays readable until they publish anew.
        fleet = self._store.fleet
        contents = {each.epoch for each in fleet.contents.all().values()}
        needed = {current.epoch, *fleet.tasks.key_epochs(), *contents}
        epochs = {each.epoch for each in fleet.secrets.group_keys()}
        fleet.secrets.drop_group_keys(epochs - needed)

    def _seal_contents(
        self, key: GroupKey, signing: Ed25519PrivateKey, catalogue: bytes | None, room: Room
    ) -> None:
        """Publish what the broker does not have, or has for other keys or readers."""
        store, published = self._store, self._store.fleet.contents
        known, wanted = published.all(), self._contents(catalogue)
        # Heads are signed: by another key after a rotation.
        signer = signing.public_key().public_bytes_raw().hex()
        for content_id, (kind, content) in wanted.items():
            name, messages = content_id.hex(), None
            before = known.get(name, PublishedContent((), 0, ""))
            tasks = tuple(sorted({*before.tasks, store.number}))
            names = (self._task.name, self._task.cohort) if len(tasks) == 1 else SHARED
            sealed_as = " ".join((signer, *names, str(room.chunk_bytes)))
            made = PublishedContent(tasks, key.epoch, sealed_as)
            if replace(made, tasks=before.tasks) != before:
                publication = Publication(key, *names, self._random_bytes)
                sealed = seal_content(
                    *(publication, signing, kind, content_id, content, room.chunk_bytes)
                )
                messages = [
                    (self._topics.write(ChunkTopic(content_id, index)), message)
                    for index, message in enumerate(sealed)
                ]
                room.require(f"the task's {kind.value}", messages)
            if made != before:
                published.put(name, made, messages)
        published.keep(store.number, {each.hex() for each in wanted})

    def _contents(self, catalogue: bytes | None) -> dict[bytes, tuple[ContentKind, bytes]]:
        """Kind and bytes of what this task publishes, by content id."""
        found = {}
        if catalogue is not None:
            found[catalogue_id(catalogue)] = (ContentKind.CATALOGUE, catalogue)
        for artifact in self._artifacts:
            for each in (artifact, artifact.companion):
                if each is not None:
                    found[each.artifact_id] = (ContentKind.ARTIFACT, each.content)
                    if each.shared is not None:
                        found[each.shared_id] = (ContentKind.SHARED, each.shared)
        return found

    def _publication(self, key: GroupKey) -> Publication:
        return Publication(key, self._task.name, self._task.cohort, self._random_bytes)


def _unsendable(error: ValueError) -> AggregatorError:
    return AggregatorError(f"the model cannot be sent: {error}")
