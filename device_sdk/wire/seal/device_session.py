"""The device's end of a session that is not open yet: asking for one."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import Clock
from device_sdk.wire.seal.broadcast import GroupKey
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import (
    ADMISSION_KEY_BYTES,
    DEVICE_ID_BYTES,
    RUN_BYTES,
    OpenRequest,
    decode_reply,
    encode_open,
)
from device_sdk.wire.seal.keys import RandomBytes, draw
from device_sdk.wire.seal.session import (
    SECRET_BYTES,
    End,
    Session,
    derive_session_keys,
)


@dataclass(frozen=True)
class DeviceCredential:
    """What enrolment left with the device."""

    device_id: bytes
    identity: Ed25519PrivateKey
    admission_key: bytes

    def __post_init__(self) -> None:
        if len(self.device_id) != DEVICE_ID_BYTES:
            raise ValueError(f"a device id has {DEVICE_ID_BYTES} bytes")
        if len(self.admission_key) != ADMISSION_KEY_BYTES:
            raise ValueError(f"an admission key has {ADMISSION_KEY_BYTES} bytes")

    def __repr__(self) -> str:
        return f"DeviceCredential(device_id={self.device_id.hex()}, ...)"


@dataclass(frozen=True)
class OpenedSession:
    """A session and what came with it."""

    session: Session
    incarnation: bytes
    time_unix_seconds: int
    """The aggregator's time when it answered."""
    group_keys: tuple[GroupKey, ...]
    clash: bool = False
    """Whether another machine opened sessions with the same identity of late."""


class SessionOpening:
    """One attempt to open a session: :attr:`message` goes out, :meth:`accept` takes the reply.

    A resend within the attempt sends the same bytes; the aggregator answers them with the same
    reply. ``freshness``: of the life of the aggregator that is asked, with a counter that no other
    attempt ever had; it must be on the disk, flushed, before the message is sent.

    The ephemeral key and the secret are dropped as soon as a reply was accepted.
    """

    def __init__(
        self,
        credential: DeviceCredential,
        descriptor: Descriptor,
        freshness: Freshness,
        clock: Clock,
        *,
        run: bytes = bytes(RUN_BYTES),
        random_bytes: RandomBytes = os.urandom,
        seal: hpke.Seal = hpke.seal,
    ) -> None:
        ephemeral_seed = draw(random_bytes, hpke.SEED_BYTES)
        secret = draw(random_bytes, SECRET_BYTES)
        request = OpenRequest(credential.device_id, hpke.public_bytes(ephemeral_seed), secret, run)
        self.message = encode_open(
            request, credential.identity, credential.admission_key, descriptor, freshness, seal
        )
        self._descriptor = descriptor
        self._clock = clock
        self._secrets: tuple[hpke.PrivateKey, bytes] | None = (
            hpke.private_key(ephemeral_seed),
            secret,
        )

    def accept(
        self,
        reply_message: bytes,
        signed_unix_seconds: int,
        unseal: hpke.Unseal = hpke.unseal,
    ) -> OpenedSession:
        """The session that ``reply_message`` grants.

        ``signed_unix_seconds`` is the largest time that was signed under this descriptor, from the
        device's store: once it has expired it stays so.

        A reply that is not ours or not right raises ``WireError`` and changes nothing: anybody can
        send one, so the right one may still come. ``descriptor-expired`` (the descriptor expired by
        the time in the reply) and ``already-answered`` end the attempt.
        """
        if self._secrets is None:
            raise WireError("already-answered", "this open has had its reply")
        ephemeral, secret = self._secrets
        open_digest = hashlib.sha256(self.message).digest()
        reply = decode_reply(reply_message, open_digest, ephemeral, self._descriptor, unseal)
        self._secrets = None
        self._descriptor.require_unexpired(max(reply.time_unix_seconds, signed_unix_seconds))
        keys = derive_session_keys(secret, reply.secret, self.message, reply_message)
        session = Session(reply.session_id, keys, End.DEVICE, self._clock)
        return OpenedSession(
            session, reply.incarnation, reply.time_unix_seconds, reply.group_keys, reply.clash
        )
