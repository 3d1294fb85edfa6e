"""From a manifest's message to the decision whether to take part."""

from __future__ import annotations

from dataclasses import dataclass

from device_sdk.home.membership import Membership
from device_sdk.home.round_store import RoundStore
from device_sdk.rounds.session_keeper import SessionKeeper
from device_sdk.wire.broadcast import derive_broadcast_keys, open_manifest, read_manifest_label
from device_sdk.wire.errors import WireError
from device_sdk.wire.manifest import Manifest, Order, order, read_manifest, selected

__all__ = ["Accepted", "ManifestIntake"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A verified manifest that asks for something. ``selected``: whether this device is to act."""

    manifest: Manifest
    selected: bool


class ManifestIntake:
    """Verifies manifests of the device's own task and cohort, in the order the protocol demands."""

    def __init__(self, membership: Membership, store: RoundStore, sessions: SessionKeeper) -> None:
        self._membership = membership
        self._store = store
        self._sessions = sessions

    def take(self, message: bytes) -> Accepted | None:
        """The manifest in ``message``; None for one that was concluded before.

        Needs an open session. The manifest's mark is on the disk when this returns. A round that a
        crash interrupted before its end comes back as if new. Raises ``WireError``:
        ``unknown-epoch`` (open a new session), ``stale-manifest``, ``version-fell``,
        ``expired-manifest``, ``wrong-manifest``, or another.
        """
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
        if manifest.root_fingerprint != membership.root_fingerprint:
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
