"""A round that this device was selected for, while what it needs is being fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from device_sdk.errors import RuntimeMissing
from device_sdk.home.task_store import Takes
from device_sdk.methods.learner import Declined, LearnerError
from device_sdk.rounds import Actions, Download, Subscribe, Unsubscribe
from device_sdk.rounds.sender import Sender
from device_sdk.rounds.session import SessionKeeper
from device_sdk.rounds.turns import DayBudget, Turns
from device_sdk.system.clock import Backoff
from device_sdk.train.job import LocalArtifact, RoundTrainer, TrainingJob, learner_class
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.catalogue import NO_CATALOGUE, Catalogue
from device_sdk.wire.publish.content import (
    HEAD_INDEX,
    SHARED,
    ContentKind,
    open_content_head,
    unpack_artifact,
)
from device_sdk.wire.publish.manifest import ChunkSet, RoundManifest
from device_sdk.wire.publish.report import Reason
from device_sdk.wire.publish.task_messages import (
    OfferedArtifact,
    OfferedAttachment,
    TaskTerms,
    read_attachment,
    read_broadcast,
)
from device_sdk.wire.publish.topics import ChunkTopic
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    derive_broadcast_keys,
    find_group_key,
    read_manifest_label,
    unwrap_cohort_key,
)
from device_sdk.world import DeviceWorld, TrainingOptions


class Retry:
    """When to ask again for what did not come."""

    def __init__(self, world: DeviceWorld) -> None:
        pace = world.pace
        self._first_seconds = pace.fetch_seconds
        self._clock = world.clock
        self._backoff = Backoff(
            world.rng, first_seconds=pace.fetch_seconds, most_seconds=pace.most_seconds
        )
        self.progressed()

    def progressed(self) -> None:
        """Something came: give the rest its time."""
        self.next_seconds = self._clock() + self._first_seconds

    def due(self) -> bool:
        """Whether to ask again now; then the next time is later."""
        if self._clock() < self.next_seconds:
            return False
        wait = max(self._first_seconds, self._backoff.next_seconds())
        self.next_seconds = self._clock() + wait
        return True


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What the rounds of all of a device's tasks share."""

    sessions: SessionKeeper
    sender: Sender
    actions: Actions
    turns: Turns
    budget: DayBudget


@dataclass(frozen=True, slots=True)
class Wanted:
    """A content to fetch; ``kind`` None: the round's broadcast. ``cohort`` and ``cohort_key``: for
    what only some of the task's devices may read."""

    kind: ContentKind | None
    content_id: bytes
    cohort: str = ""
    cohort_key: bytes | None = None


class Fetch:
    """One content on its way to this device.

    Of a broadcast the verified manifest names the chunks. Of an artifact, a
    catalogue or an attachment the signed head comes first and alone, then the chunks it names: in
    this order nothing has to be kept that no signature vouches for. Chunks come from the fleet's
    mirror, where it has one; from the broker, once anything does not come from there.
    """

    def __init__(
        self, wanted: Wanted, manifest: RoundManifest, world: DeviceWorld, shared: DeviceParts
    ) -> None:
        self.kind, self.content_id, self.cohort = wanted.kind, wanted.content_id, wanted.cohort
        kind, content_id, sessions = wanted.kind, wanted.content_id, shared.sessions
        self._names = [(manifest.task, wanted.cohort)]
        if wanted.cohort_key is None:
            self._names = [(manifest.task, manifest.cohort), SHARED]
        self._cohort_key = wanted.cohort_key
        self._sessions, self._actions = sessions, shared.actions
        self._topics, self._filter = world.topics, world.topics.chunk_filter(content_id)
        self._mirror = sessions.placement.mirror
        self._head_message = b""
        self.chunks: ChunkSet | None = None
        """None while the head has not come."""
        self._head = ""
        if kind is not None:
            self._head = world.topics.write(ChunkTopic(content_id, HEAD_INDEX))
        else:
            key = find_group_key(sessions.group_keys, manifest.key_epoch)
            keys = derive_broadcast_keys(key, content_id, manifest.task, manifest.cohort)
            self.chunks = ChunkSet(keys, content_id, manifest.chunks, manifest.length)
        self.start()

    def start(self) -> None:
        """Ask for what is missing, or ask again: of the broker, which sends what it retains."""
        if self.chunks is None:
            self._actions.append(Subscribe(self._head))
        else:
            self._ask_for_chunks(self.chunks)

    def not_mirrored(self) -> None:
        """The mirror lacks a chunk: the broker has all of them."""
        if self._mirror:
            self.ask_again()

    def ask_again(self) -> None:
        """Nothing has come for a while: ask the broker, whoever was asked before."""
        self._mirror = ""
        self.start()

    def _ask_for_chunks(self, chunks: ChunkSet) -> None:
        if not self._mirror:
            self._actions.append(Subscribe(self._filter))
            return
        first = 0 if self.kind is None else HEAD_INDEX + 1
        for index, digest in chunks.digests():
            topic = ChunkTopic(self.content_id, first + index)
            self._actions.append(Download(self._mirror, self._topics.write(topic), digest))

    def stop(self) -> None:
        """Unsubscribe."""
        if self.kind is not None:
            self._actions.append(Unsubscribe(self._head))
        self._actions.append(Unsubscribe(self._filter))

    def add(self, index: int, message: bytes) -> bool:
        """Take the message at a topic's index; whether all is there. Raises ``WireError``."""
        if self.kind is not None and index == HEAD_INDEX:
            return self._take_head(message)
        return self.chunks is not None and self.chunks.add(message)

    def _take_head(self, message: bytes) -> bool:
        if message == self._head_message:
            return False
        label = read_manifest_label(message)
        if self._cohort_key is None:
            key = find_group_key(self._sessions.group_keys, label.epoch)
        else:
            key = GroupKey(label.epoch, self._cohort_key)
        head, keys = open_content_head(message, key, self._names, self._sessions.signing())
        if (head.kind, head.content_id) != (self.kind, self.content_id):
            raise WireError("wrong-content", "the head of another content")
        # A head of a new epoch comes with new chunks; what was collected is worth nothing then.
        self._head_message = message
        self.chunks = ChunkSet(keys, label.broadcast_id, head.chunks, head.length)
        self._ask_for_chunks(self.chunks)
        return not self.chunks.missing


@dataclass(frozen=True, slots=True)
class Offer:
    """What a round's terms offer to one device, attachments that it may read and the keys to them.

    ``readable`` by name; ``keys`` by cohort, of the cohorts that this device belongs to.
    """

    readable: Mapping[str, OfferedAttachment]
    keys: Mapping[str, bytes]


def read_offer(terms: TaskTerms, manifest: RoundManifest, world: DeviceWorld) -> Offer:
    """The attachments that this device may read. Raises ``WireError``: ``bad-tag``, ``bad-field``.

    ``bad-field`` for a content that two attachments name with different sizes or readers.
    """
    keys = {}
    admission_key = world.membership.grant.admission_key
    for cohort, wrapped in terms.cohort_keys.items():
        key = unwrap_cohort_key(
            wrapped, admission_key, manifest.task, cohort, manifest.broadcast_id
        )
        if key is not None:
            keys[cohort] = key
    seen: dict[bytes, OfferedAttachment] = {}
    for each in terms.attachments:
        other = seen.setdefault(each.content_id, each)
        if (other.size, other.cohort) != (each.size, each.cohort):
            raise WireError("bad-field", "two attachments disagree on one content")
    readable = {
        each.name: each for each in terms.attachments if not each.cohort or each.cohort in keys
    }
    return Offer(readable, keys)


_FEWEST_DIGITS = 8


def pick_artifacts(
    offered: Sequence[OfferedArtifact], options: TrainingOptions
) -> tuple[OfferedArtifact, ...]:
    """Those that the device's options name or allow, smallest first; at least one.

    Raises :class:`Declined`.
    """
    name, most_bytes = options.artifact, options.most_artifact_bytes
    if name is not None:
        found = tuple(
            each
            for each in offered
            if each.name == name
            or (len(name) >= _FEWEST_DIGITS and each.artifact_id.hex().startswith(name))
        )
        if len(found) != 1:
            names = ", ".join(each.name for each in offered)
            raise Declined(
                f"the task offers {len(found)} artifacts named {name!r}; it offers {names}",
                Reason.NO_ARTIFACT_FITS,
            )
        return found
    taken: list[OfferedArtifact] = []
    total = 0
    shared: set[bytes] = set()
    for each in offered:
        total += each.total_size
        if each.shared is not None:
            total -= each.shared.size * (each.shared.content_id in shared)
            shared.add(each.shared.content_id)
        if total > most_bytes:
            break
        taken.append(each)
    if not taken:
        raise Declined(
            f"the task's smallest artifact has {offered[0].total_size} bytes, this device "
            f"takes {most_bytes} (TrainingOptions.most_artifact_bytes)",
            Reason.NO_ARTIFACT_FITS,
        )
    return tuple(taken)


NO_ARTIFACT = bytes(32)
"""The artifact id of a task that leaves it to the device: the first installed one is used."""


class OpenRound:
    """Fetches the broadcast and the catalogue, then the artifacts that its terms list and this
    device takes, and, after :meth:`ask_for`, attachments. What is here already is not fetched.

    Raises ``WireError``: ``unknown-epoch``, ``truncated``.
    """

    def __init__(
        self,
        manifest: RoundManifest,
        world: DeviceWorld,
        shared: DeviceParts,
    ) -> None:
        if not manifest.chunks:
            raise WireError("truncated", "a broadcast without chunks has no terms")
        self.manifest = manifest
        self._world, self._home = world, world.home
        self._shared = shared
        self.retry = Retry(world)
        self.broken: WireError | None = None
        """Why what came whole, signed by the aggregator, cannot be used all the same."""
        self._terms: TaskTerms | None = None
        self._broadcast: Broadcast | None = None
        self._offer = Offer({}, {})
        self._wanted: tuple[str, ...] = ()
        self._artifacts: tuple[LocalArtifact, ...] = ()
        self.received_bytes = 0
        """Of the messages that came for it."""
        self.asks = False
        """Whether the learner has yet to say which attachments it wants."""
        self.fetches: dict[bytes, Fetch] = {}
        """By content id, what is known to be needed and has not come."""
        self._fetch(Wanted(None, manifest.broadcast_id))
        wanted = manifest.catalogue_id
        if wanted != NO_CATALOGUE and self._home.models.catalogue(wanted) is None:
            self._fetch(Wanted(ContentKind.CATALOGUE, wanted))

    def add(self, content_id: bytes, index: int, message: bytes) -> None:
        """A chunk's or head's message came.

        Raises ``WireError``; :class:`Declined`, once the terms are known, where there is nothing to
        train on, and :class:`OverBudget` where what they name is too much.
        """
        fetch = self.fetches.get(content_id)
        if fetch is None:
            return
        self.received_bytes += len(message)
        complete = fetch.add(index, message)
        self.retry.progressed()
        if not complete or fetch.chunks is None:
            return
        fetch.stop()
        try:
            plaintext = fetch.chunks.plaintext()
            if fetch.kind is None:
                self._take_broadcast(plaintext)
            else:
                self._store(fetch.kind, fetch, plaintext)
        except WireError as error:
            self.broken = error
            raise
        del self.fetches[content_id]  # last: what could not be stored is fetched again

    def ask_for(self, names: Sequence[str]) -> None:
        """The learner wants these attachments. Raises LearnerError for one that is not offered, and
        :class:`OverBudget`."""
        unknown = [name for name in names if name not in self._offer.readable]
        if unknown:
            raise LearnerError(f"the learner wants {unknown[0]!r}, which is not offered to it")
        self.asks = False
        self._wanted = tuple(dict.fromkeys(names))
        offers = {e.content_id: e for e in map(self._offer.readable.__getitem__, self._wanted)}
        lacking = {i: each for i, each in offers.items() if self._stored(i) is None}
        if self.manifest.threshold:  # a last version is read whatever it takes, as it ever was
            self._shared.budget.require(bytes_=sum(each.size for each in lacking.values()))
        for content_id, offered in lacking.items():
            if content_id not in self.fetches:
                key = self._offer.keys[offered.cohort] if offered.cohort else None
                self._fetch(Wanted(ContentKind.ATTACHMENT, content_id, offered.cohort, key))
        self.retry.progressed()

    def ask_again(self) -> None:
        """Subscribe again to what is missing."""
        for fetch in self.fetches.values():
            fetch.ask_again()

    def not_mirrored(self, content_id: bytes) -> None:
        """The mirror lacks a chunk of this content."""
        if content_id in self.fetches:
            self.fetches[content_id].not_mirrored()

    def job(self) -> TrainingJob:
        """The training job, once complete. Raises ``WireError``: ``bad-catalogue``, or parsers'."""
        assert self._terms is not None and self._broadcast is not None
        broadcast = replace(
            self._broadcast,
            offered={name: each.size for name, each in self._offer.readable.items()},
            attachments={name: self._attachment(name) for name in self._wanted},
        )
        catalogue, fresh = self._catalogue()
        return TrainingJob(self.manifest, self._terms, broadcast, catalogue, self._artifacts, fresh)

    def _fetch(self, wanted: Wanted) -> None:
        self.fetches[wanted.content_id] = Fetch(wanted, self.manifest, self._world, self._shared)

    def _take_broadcast(self, plaintext: bytes) -> None:
        self._terms, self._broadcast = read_broadcast(plaintext, self.manifest)
        rests = self.manifest.threshold == 0
        if not rests:
            self._learn_terms(self._terms)
            if lack := self._world.lacks(self.manifest.task):
                raise Declined(lack, Reason.NO_DATA)
        self._offer = read_offer(self._terms, self.manifest, self._world)
        self.asks = bool(self._offer.readable)
        if rests:
            # Nobody trains: what is here will do.
            self._artifacts = tuple(
                self._local(each) for each in self._terms.artifacts if self._is_here(each)
            )
            return
        self._home.attachments.keep_only(
            self.manifest.task, {each.content_id for each in self._offer.readable.values()}
        )
        folder, has = self._world.artifact_folder, self._world.has_artifact
        if self._terms.artifacts:
            picked = pick_artifacts(self._terms.artifacts, self._world.options)
            self._artifacts = tuple(self._local(each) for each in picked)
            both = [one for each in picked for one in (each, each.companion)]
            artifacts = [one.artifact_id for one in both if one is not None]
            sizes = {o.artifact_id: o.size for o in both if o and not has(o.artifact_id)}
            shares = {each.shared.content_id: each.shared.size for each in picked if each.shared}
            lacking = {i: size for i, size in shares.items() if not self._home.has_shared(i)}
            self._shared.budget.require(bytes_=sum(sizes.values()) + sum(lacking.values()))
            for content_id in lacking:
                if content_id not in self.fetches:
                    self._fetch(Wanted(ContentKind.SHARED, content_id))
        else:
            artifacts, shares = [self._named_artifact()], {}
            self._artifacts = (LocalArtifact(artifacts[0], "", folder(artifacts[0])),)
        self._home.tasks.set_artifacts(self.manifest.task, (*artifacts, *shares))
        for artifact_id in artifacts:
            if not has(artifact_id) and artifact_id not in self.fetches:
                self._fetch(Wanted(ContentKind.ARTIFACT, artifact_id))

    def _learn_terms(self, terms: TaskTerms) -> None:
        """Keep what the terms say of the task."""
        task, tasks = self.manifest.task, self._home.tasks
        takes: Takes | None
        try:
            takes = "records" if issubclass(learner_class(terms.method), RoundTrainer) else "arrays"
        except (Declined, RuntimeMissing):
            takes = None  # its training will say so
        with self._home.database.transaction():
            tasks.set_terms(
                task, self.manifest.cohort, self.manifest.generation, terms.method, takes
            )
            if takes == "records" and "" in self._home.record_names(task):
                tasks.own(task)

    def _named_artifact(self) -> bytes:
        """The manifest's, or the one that is installed where it leaves that to the device."""
        if self.manifest.artifact_id != NO_ARTIFACT:
            return self.manifest.artifact_id
        if not self._world.installed:
            raise WireError("no-artifact", "the task names no artifact, and none is installed")
        return next(iter(self._world.installed))

    def _local(self, offered: OfferedArtifact) -> LocalArtifact:
        companion, folder = offered.companion, self._world.artifact_folder
        return LocalArtifact(
            offered.artifact_id,
            offered.name,
            folder(offered.artifact_id),
            None if companion is None else folder(companion.artifact_id),
        )

    def _is_here(self, offered: OfferedArtifact) -> bool:
        if offered.shared is not None and not self._home.has_shared(offered.shared.content_id):
            return False
        both = [offered] if offered.companion is None else [offered, offered.companion]
        return all(self._world.has_artifact(each.artifact_id) for each in both)

    def _store(self, kind: ContentKind, fetch: Fetch, content: bytes) -> None:
        match kind:
            case ContentKind.ARTIFACT:
                files = unpack_artifact(content, fetch.content_id)
                self._home.save_artifact(fetch.content_id, files)
            case ContentKind.SHARED:
                if hashlib.sha256(content).digest() != fetch.content_id:
                    raise WireError("wrong-content", "other values than the terms name")
                self._home.save_shared(fetch.content_id, content)
            case ContentKind.ATTACHMENT:
                read_attachment(content, fetch.cohort)
                self._home.attachments.save(self.manifest.task, fetch.content_id, content)
            case ContentKind.CATALOGUE:
                if hashlib.sha256(content).digest() != fetch.content_id:
                    raise WireError("wrong-content", "another catalogue than the manifest names")
                decode(Catalogue, content)
                self._home.models.save_catalogue(content)

    def _attachment(self, name: str) -> Attachment:
        offered = self._offer.readable[name]
        content = self._stored(offered.content_id)
        assert content is not None, "fetched before, or the round would not be complete"
        return read_attachment(content, offered.cohort)

    def _stored(self, content_id: bytes) -> bytes | None:
        return self._home.attachments.content(self.manifest.task, content_id)

    def _catalogue(self) -> tuple[Catalogue | None, bool]:
        """And whether its rows stand for others than before. Raises ``WireError``."""
        content = self._home.models.catalogue(self.manifest.catalogue_id)
        if content is None:
            return None, False
        catalogue = decode(Catalogue, content)
        last = self._home.models.last_catalogue(self.manifest.task)
        if last is None or last[1] == self.manifest.catalogue_id:
            return catalogue, False
        generation, catalogue_id = last
        before = self._home.models.catalogue(catalogue_id)
        if before is None:
            return catalogue, False
        older = decode(Catalogue, before)
        if catalogue.extends(older):
            return catalogue, False
        if self.manifest.generation <= generation:
            raise WireError("bad-catalogue", "the catalogue changes what its rows stand for")
        # Of a generation that came of a backup it is shorter, of a task that was replaced another.
        return catalogue, not older.extends(catalogue)
