"""What a recorded enrolment gives to somebody who later gets hold of the HPKE key of that time."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aggregator.serve.uplink import Refusal
from device_sdk.link.events import Message
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.topics import DownTopic, UpTopic
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.enrolment_message import enrol_info, read_request_head
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import (
    DeviceCredential,
    SessionOpening,
    open_info,
    read_open_head,
)
from tests.attacks.stage import Stage
from tests.attacks.test_replays import OPEN, _ask, _attempt, _invite


def read_answer(
    request: bytes, answer: bytes, key: hpke.PrivateKey, descriptor: Descriptor
) -> bytes:
    """What the answer holds, from the two recorded messages and the aggregator's HPKE key alone."""
    head = read_request_head(request)
    opened = hpke.unseal(key, enrol_info(descriptor, head.freshness), request[74:])
    asked = cbor.decode(opened[64:], limit_bytes=4096)
    secret = asked["secret"]
    assert isinstance(secret, bytes)
    digest = hashlib.sha256(request).digest()
    kdf = HKDF(algorithm=SHA256(), length=32, salt=digest, info=b"tessera/1 enrol answer")
    return ChaCha20Poly1305(kdf.derive(secret)).decrypt(answer[2:14], answer[14:], answer[:2])


def test_the_hpke_key_opens_recorded_answers_and_the_admission_key_opens_no_session(
    stage: Stage,
) -> None:
    attempt = _attempt(stage, _invite(stage), Ed25519PrivateKey.generate())
    answer = _ask(stage, attempt.message)
    device = max(stage.store.devices.all(), key=lambda row: row.enrolled_unix_seconds)
    keys = stage.parts.keys.current()

    # There is no forward secrecy here, as the threat model says.
    told = read_answer(attempt.message, answer, keys.hpke, keys.descriptor)
    assert device.admission_key in told and device.device_id in told and device.handle in told

    # Past the first check, and no further: the identity never travelled.
    stranger = DeviceCredential(
        device.device_id, Ed25519PrivateKey.generate(), device.admission_key
    )
    freshness = Freshness(stage.incarnation(), 10**6)
    forged = SessionOpening(stranger, keys.descriptor, freshness, stage.clock)
    topic = stage.topics.write(UpTopic(device.shard, device.handle))
    refused = stage.parts.uplink.receive(Message(topic, forged.message, False))
    assert isinstance(refused, Refusal) and refused.error.reason == "bad-signature"


def test_the_hpke_key_opens_no_recorded_session(stage: Stage) -> None:
    opened = stage.sent_up(0, OPEN)[0]
    keys = stage.parts.keys.current()
    # s_d is read; s_a came under a key that its device has erased.
    info = open_info(keys.descriptor, read_open_head(opened).freshness)
    assert b"secret" in hpke.unseal(keys.hpke, info, opened[50:])
    down = stage.topics.write(DownTopic(stage.devices[0].grant.handle))
    replies = [
        one for at, one in stage.broker.seen if at == down and one[1] == MessageType.SESSION_REPLY
    ]
    assert replies
    for reply in replies:
        with pytest.raises(WireError, match="seal"):
            info = b"tessera/1 reply" + hashlib.sha256(opened).digest()
            hpke.unseal(keys.hpke, info, reply[2:])
