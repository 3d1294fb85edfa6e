"""Many connected devices on one selector, each with one update in flight."""

from __future__ import annotations

import hashlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.aggregator.fleet import BenchDevice
from benchmarks.aggregator.mqtt_client import MiniClient
from device_sdk.wire.codec.message import MessageType, decode
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    Verdict,
    update_digest,
    write_update,
)
from device_sdk.wire.publish.topics import DownTopic, ManifestTopic, PresenceTopic, Topics, UpTopic
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    derive_broadcast_keys,
    find_group_key,
    open_manifest,
    read_manifest_label,
)
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.device_session import DeviceCredential, SessionOpening
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.placement import shard_of
from device_sdk.wire.seal.session import DeviceSessions
from device_sdk.wire.seal.signature import public_key

_PATIENCE_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_REPEAT_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_OPEN_AGAIN_SECONDS = 3.0
_FORGED_COUNTER = 2**40


@dataclass
class _Connected:
    device: BenchDevice
    client: MiniClient
    up_topic: str
    body: bytes
    sessions: DeviceSessions = field(default_factory=DeviceSessions)
    opening: SessionOpening | None = None
    awaited: bytes = b""
    """The digest of the update in flight; empty when there is none."""
    resend_seconds: float = 0.0
    """By the monotonic clock, when it is sent again."""


class Announced:
    """What the aggregator tells everybody, as devices of the task ``default`` read it."""

    def __init__(self, topics: Topics, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._presence_topic = topics.write(PresenceTopic())
        self._manifest_topic = topics.write(ManifestTopic("default", "all"))
        self._group_keys: tuple[GroupKey, ...] = ()
        self._sealed = b""
        self.incarnation = b""
        self.manifest: RoundManifest | None = None

    @property
    def topics(self) -> tuple[str, str]:
        """Where it is told."""
        return self._manifest_topic, self._presence_topic

    def hear(self, topic: str, payload: bytes) -> None:
        """What came on one of them."""
        if topic == self._presence_topic:
            self.incarnation = read_announcement(Presence, payload, self._descriptor).incarnation
        elif payload:
            self._sealed = payload
            self._read()

    def learn(self, group_keys: tuple[GroupKey, ...]) -> None:
        """What a session's reply tells; manifests can be read with them."""
        if group_keys != self._group_keys:
            self._group_keys = group_keys
            self._read()

    def _read(self) -> None:
        if not self._group_keys or not self._sealed:
            return
        label = read_manifest_label(self._sealed)
        key = find_group_key(self._group_keys, label.epoch)
        keys = derive_broadcast_keys(key, label.broadcast_id, "default", "all")
        signing = public_key(self._descriptor.signing)
        self.manifest = decode(RoundManifest, open_manifest(self._sealed, keys, signing))


class Load:
    """Connects ``devices``; :meth:`open_sessions` and :meth:`run` drive them.

    As the protocol's devices do, these send an update again when no receipt came for two to three
    seconds, and then every ten; ``resent`` counts that. Only the first receipt of an update counts.
    ``account``: the devices' user and password at the broker, if it asks for any.
    """

    def __init__(
        self,
        port: int,
        devices: Sequence[BenchDevice],
        bodies: Sequence[bytes],
        descriptor: Descriptor,
        rng: np.random.Generator,
        account: tuple[str, str] | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._rng = rng
        self._topics = Topics()
        self._selector = selectors.DefaultSelector()
        self._announced = Announced(self._topics, descriptor)
        self._fleet: list[_Connected] = []
        self._counted = 0
        self._done_for = 0
        self.resent = 0
        for index, device in enumerate(devices):
            client = MiniClient(port, device.handle.hex(), account)
            client.subscribe(self._topics.write(DownTopic(device.handle)))
            if index == 0:
                for each in self._announced.topics:
                    client.subscribe(each)
            topic = self._topics.write(
                UpTopic(shard_of(device.credential.device_id), device.handle)
            )
            one = _Connected(device, client, topic, bodies[index % len(bodies)])
            self._selector.register(client.socket, selectors.EVENT_READ, one)
            self._fleet.append(one)

    @property
    def incarnation(self) -> bytes:
        """The aggregator's life, once it was heard of."""
        return self._announced.incarnation

    def open_sessions(self) -> None:
        """One session each."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self.incarnation:
            self._hear(self._fleet[0])
            self._turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError("the aggregator did not show itself in time")
        for one in self._fleet:
            one.opening = self._opening(one.device.credential)
            one.client.publish(one.up_topic, one.opening.message)
            self._turn(0.0)
        again_at = time.monotonic() + _OPEN_AGAIN_SECONDS
        while waiting := [one for one in self._fleet if one.opening is not None]:
            self._turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError("sessions were not opened in time")
            if time.monotonic() > again_at:
                again_at = time.monotonic() + _OPEN_AGAIN_SECONDS
                for one in waiting:
                    if one.opening is not None:
                        one.client.publish(one.up_topic, one.opening.message)

    def forged_open(self, device: BenchDevice) -> bytes:
        """An open that is right in all but its admission tag: what anybody could make up."""
        key = self._rng.bytes(len(device.credential.admission_key))
        credential = replace(device.credential, admission_key=key)
        return self._opening(credential, _FORGED_COUNTER).message

    def run(self, updates: int) -> float:
        """Send ``updates`` and wait for their receipts; the seconds it took."""
        began = time.perf_counter()
        target, seen = self._counted + updates, -1
        until = look_at = 0.0
        while self._counted < target:
            manifest, now = self._announced.manifest, time.monotonic()
            if self._counted != seen:
                # However slow the machine is: only a standstill is a failure.
                seen, until = self._counted, now + _PATIENCE_SECONDS
            if manifest is not None and manifest.round > self._done_for:
                self._done_for = manifest.round
                for one in self._fleet:
                    self._send(one, manifest)
                    one.resend_seconds = now + _REPEAT_SECONDS * self._rng.uniform(1.0, 1.5)
            elif manifest is not None and now > look_at:
                look_at = now + _LOOK_SECONDS
                for one in self._fleet:
                    if one.awaited and now > one.resend_seconds:
                        self._send(one, manifest)
                        one.resend_seconds = now + _ANSWER_SECONDS
                        self.resent += 1
            self._turn(0.05)
            if now > until:
                raise TimeoutError(f"{self._counted} of {target} receipts came, then none")
        return time.perf_counter() - began

    def close(self) -> None:
        """Disconnect."""
        for one in self._fleet:
            self._selector.unregister(one.client.socket)
            one.client.socket.close()

    def _opening(self, credential: DeviceCredential, counter: int = 1) -> SessionOpening:
        freshness = Freshness(self.incarnation, counter)
        return SessionOpening(credential, self._descriptor, freshness, time.monotonic)

    def _send(self, one: _Connected, manifest: RoundManifest) -> None:
        device_id = one.device.credential.device_id
        identity = UpdateIdentity(device_id, "default", manifest.generation, manifest.round)
        one.awaited = update_digest(identity, hashlib.sha256(one.body).digest())
        sealed = one.sessions.seal(RecordType.UPDATE, write_update(identity, one.body))
        one.client.publish(one.up_topic, sealed)

    def _turn(self, timeout_seconds: float) -> None:
        for key, _ in self._selector.select(timeout_seconds):
            self._hear(key.data)

    def _hear(self, one: _Connected) -> None:
        for topic, payload in one.client.received():
            if topic in self._announced.topics:
                self._announced.hear(topic, payload)
            else:
                self._take(one, payload)

    def _take(self, one: _Connected, payload: bytes) -> None:
        if payload[1] == MessageType.SESSION_REPLY:
            if one.opening is not None:
                opened = one.opening.accept(payload, 0)
                one.sessions.install(opened.session)
                one.opening = None
                self._announced.learn(opened.group_keys)
            return
        received = one.sessions.receive(payload)
        if received.message_type != RecordType.RECEIPT:
            return  # where it belongs: it stays where it is
        receipt = decode(Receipt, received.payload)
        if receipt.verdict is not Verdict.COUNTED:
            raise RuntimeError(f"an update was not counted: {receipt}")
        if receipt.digest == one.awaited:
            one.awaited = b""
            self._counted += 1
