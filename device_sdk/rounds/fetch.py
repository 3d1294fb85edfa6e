"""Fetching what many devices receive: the chunks of a broadcast, an artifact or a catalogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from device_sdk.link.backoff import Backoff
from device_sdk.rounds.actions import Actions
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.session import SessionKeeper
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.content import HEAD_INDEX, ChunkSet, ContentKind, read_content_head
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.topics import ChunkTopic, Topics
from device_sdk.wire.seal.broadcast import (
    derive_broadcast_keys,
    open_manifest,
    read_manifest_label,
)
from device_sdk.wire.seal.group_key import GroupKey


class Fetch(Protocol):
    """One content on its way. ``content_id`` is the one in its chunks' topics."""

    content_id: bytes

    def start(self) -> None:
        """Subscribe, or subscribe again: the broker sends what it retains."""

    def stop(self) -> None:
        """Unsubscribe."""

    def add(self, index: int, message: bytes) -> bool:
        """Take the message at a topic's index; whether all is there. Raises ``WireError``."""

    def plaintext(self) -> bytes:
        """The whole. Raises ``WireError``."""


class Retry:
    """When to ask again for what did not come."""

    def __init__(self, pace: Pace, clock: Callable[[], float], rng: np.random.Generator) -> None:
        self._first_seconds = pace.fetch_seconds
        self._clock = clock
        self._backoff = Backoff(
            rng, first_seconds=pace.fetch_seconds, most_seconds=pace.most_seconds
        )
        self.next_seconds = clock() + self._first_seconds

    def due(self) -> bool:
        """Whether to ask again now; then the next time is later."""
        if self._clock() < self.next_seconds:
            return False
        wait = max(self._first_seconds, self._backoff.next_seconds())
        self.next_seconds = self._clock() + wait
        return True

    def progressed(self) -> None:
        """Something came: give the rest its time."""
        self.next_seconds = self._clock() + self._first_seconds


class BroadcastFetch:
    """The chunks that a verified manifest names."""

    def __init__(
        self, manifest: RoundManifest, sessions: SessionKeeper, topics: Topics, actions: Actions
    ) -> None:
        key = sessions.group_key(manifest.key_epoch)
        keys = derive_broadcast_keys(key, manifest.broadcast_id, manifest.task, manifest.cohort)
        self.content_id = manifest.broadcast_id
        self._chunks = ChunkSet(keys, manifest.broadcast_id, manifest.chunks, manifest.length)
        self._filter = topics.chunk_filter(manifest.broadcast_id)
        self._actions = actions

    def start(self) -> None:
        """See :class:`Fetch`."""
        self._actions.subscribe(self._filter)

    def stop(self) -> None:
        """See :class:`Fetch`."""
        self._actions.unsubscribe(self._filter)

    def add(self, index: int, message: bytes) -> bool:
        """See :class:`Fetch`."""
        return self._chunks.add(message)

    def plaintext(self) -> bytes:
        """See :class:`Fetch`."""
        return self._chunks.plaintext()


class ContentFetch:
    """An artifact, catalogue or attachment: first the signed head alone, then the chunks it names.

    In this order nothing has to be kept that no signature vouches for. ``cohort`` and
    ``cohort_key``: for what only some of the task's devices may read.
    """

    def __init__(
        self,
        kind: ContentKind,
        content_id: bytes,
        manifest: RoundManifest,
        sessions: SessionKeeper,
        topics: Topics,
        actions: Actions,
        *,
        cohort: str = "",
        cohort_key: bytes | None = None,
    ) -> None:
        self.content_id = content_id
        self.kind = kind
        self.cohort = cohort
        self._task = manifest.task
        self._sealed_for = manifest.cohort if cohort_key is None else cohort
        self._cohort_key = cohort_key
        self._sessions = sessions
        self._actions = actions
        self._head = topics.write(ChunkTopic(content_id, HEAD_INDEX))
        self._filter = topics.chunk_filter(content_id)
        self._chunks: ChunkSet | None = None
        self._head_message = b""

    def start(self) -> None:
        """See :class:`Fetch`."""
        self._actions.subscribe(self._head if self._chunks is None else self._filter)

    def stop(self) -> None:
        """See :class:`Fetch`."""
        self._actions.unsubscribe(self._head)
        self._actions.unsubscribe(self._filter)

    def add(self, index: int, message: bytes) -> bool:
        """See :class:`Fetch`."""
        if index == HEAD_INDEX:
            return self._take_head(message)
        if self._chunks is None:
            return False
        return self._chunks.add(message)

    def plaintext(self) -> bytes:
        """See :class:`Fetch`."""
        if self._chunks is None:
            raise WireError("truncated", "the content's head has not come")
        return self._chunks.plaintext()

    def _take_head(self, message: bytes) -> bool:
        if message == self._head_message:
            return False
        label = read_manifest_label(message)
        if self._cohort_key is None:
            key = self._sessions.group_key(label.epoch)
        else:
            key = GroupKey(label.epoch, self._cohort_key)
        keys = derive_broadcast_keys(key, label.broadcast_id, self._task, self._sealed_for)
        head = read_content_head(open_manifest(message, keys, self._sessions.signing()))
        if (head.kind, head.content_id) != (self.kind, self.content_id):
            raise WireError("wrong-content", "the head of another content")
        # A head of a new epoch comes with new chunks; what was collected is worth nothing then.
        self._head_message = message
        self._chunks = ChunkSet(keys, label.broadcast_id, head.chunks, head.length)
        self._actions.subscribe(self._filter)
        return not self._chunks.missing
