"""From a manifest's message to the decision whether to take part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundStore
from device_sdk.rounds.fetch import Retry
from device_sdk.rounds.pace import Pace
from device_sdk.rounds.session import SessionKeeper
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import Order, RoundManifest, order, read_manifest, selected
from device_sdk.wire.seal.broadcast import (
    derive_broadcast_keys,
    open_manifest,
    read_manifest_label,
)

# A manifest refused for one of these may be right after the next descriptor or session.
_MAY_COME_RIGHT = frozenset(
    {"unknown-epoch", "bad-signature", "bad-tag", "no-descriptor", "descriptor-expired"}
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A verified manifest that asks for something. ``selected``: whether this device is to act."""

    manifest: RoundManifest
    selected: bool


class ManifestIntake:
    """Verifies manifests of the device's own task and cohort, in the order the protocol demands.

    The newest message waits here until there is a session, and while it may come right.
    ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        membership: Membership,
        store: RoundStore,
        sessions: SessionKeeper,
        pace: Pace,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self._membership = membership
        self._store = store
        self._sessions = sessions
        self._pace = pace
        self._clock = clock
        self._rng = rng
        self._newest = b""
        self._waits = False
        self._retry: Retry | None = None

    def put(self, message: bytes) -> None:
        """A message came; one that waits is given up for it."""
        self._newest, self._waits, self._retry = message, True, None

    def take(self) -> Accepted | None:
        """The manifest that waits; None for none, and for one that was concluded before.

        Takes none without an open session. The manifest's mark is on the disk when this returns. A
        round that a crash interrupted before its end comes back as if new. Raises ``WireError``:
        ``unknown-epoch`` (open a new session), ``stale-manifest``, ``version-fell``,
        ``expired-manifest``, ``wrong-manifest``, or another; and ``sqlite3.Error`` where the mark
        cannot be written.
        """
        if not self._waits or not self._sessions.is_open:
            return None
        self._waits = False
        try:
            return self._verified(self._newest)
        except WireError as error:
            self._waits = error.reason in _MAY_COME_RIGHT
            raise

    def postpone(self) -> None:
        """What was just taken could not be acted on: it waits again, until it is :meth:`due`."""
        self._waits = True
        if self._retry is None:
            self._retry = Retry(self._pace, self._clock, self._rng)

    def due(self) -> bool:
        """Whether to take again what was postponed."""
        return self._waits and self._retry is not None and self._retry.due()

    def next_seconds(self) -> float:
        """The monotonic time at which :meth:`due` comes true; infinite for never."""
        return self._retry.next_seconds if self._retry and self._waits else math.inf

    def _verified(self, message: bytes) -> Accepted | None:
        membership = self._membership
        label = read_manifest_label(message)
        key = self._sessions.group_key(label.epoch)
        keys = derive_broadcast_keys(key, label.broadcast_id, membership.task, membership.cohort)
        body = open_manifest(message, keys, self._sessions.signing())
        manifest = read_manifest(body)
        if (manifest.key_epoch, manifest.broadcast_id) != (label.epoch, label.broadcast_id):
            raise WireError("wrong-manifest", "epoch or broadcast id differ inside and outside")
        if (manifest.task, manifest.cohort) != (membership.task, membership.cohort):
            raise WireError("wrong-manifest", "a manifest of another task or cohort")
        if manifest.root_fingerprint != self._sessions.root_fingerprint:
            raise WireError("wrong-root", "a manifest of another root")
        which, mark = order(self._store.mark(manifest.task, manifest.cohort), manifest, body)
        now_unix_seconds = self._sessions.time.now()
        if now_unix_seconds is None:
            raise WireError("no-session", "no session has given the time yet")
        if now_unix_seconds >= manifest.expiry_unix_seconds:
            raise WireError("expired-manifest", "the round's time is over")
        if which is Order.NEWER:
            self._store.save_mark(manifest, mark)
        if self._store.participation(manifest.task, manifest.generation, manifest.round):
            return None
        chosen = selected(
            manifest.sampling_seed,
            manifest.threshold,
            manifest.task,
            manifest.round,
            membership.grant.device_id,
        )
        return Accepted(manifest, chosen)
