"""The recorded vectors, regenerated and also recomputed from the primitives alone.

The second half shares no code with the package: it is what docs/wire.md says, written once more.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.vectors import generate_sealing

VECTORS: dict[str, Any] = json.loads(
    Path(generate_sealing.__file__).with_name("sealing.json").read_text(encoding="utf-8")
)


def raw(section: str, name: str) -> bytes:
    return bytes.fromhex(VECTORS[section][name])


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


def unseal(seed: bytes, info: bytes, sealed: bytes) -> tuple[bytes, bytes]:
    key = MLKEM768X25519PrivateKey(
        MLKEM768PrivateKey.from_seed_bytes(seed[:64]),
        X25519PrivateKey.from_private_bytes(seed[64:]),
    )
    suite = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
    opened = suite.decrypt(sealed, key, info=info)
    return opened[:64], opened[64:]


def verify(public: bytes, label: str, signed: bytes, message: bytes) -> None:
    """Raises InvalidSignature, which fails the test."""
    Ed25519PublicKey.from_public_bytes(public).verify(signed, label.encode() + b"\x00" + message)


BODY = raw("descriptor", "message")[475:]


def test_the_script_gives_the_recorded_file() -> None:
    assert generate_sealing.main(["--check"]) == 0


def test_a_lost_recording_is_replaced_by_one_that_says_the_same() -> None:
    fresh: Any = generate_sealing.build({})
    assert fresh["hpke_sealed"]["session_open"] != VECTORS["hpke_sealed"]["session_open"]
    for section in ("cbor", "keys", "descriptor", "presence", "tasks", "broadcast", "cohort"):
        assert fresh[section] == VECTORS[section]


@pytest.mark.parametrize("vector", VECTORS["cbor"], ids=lambda vector: vector["value"])
def test_cbor(vector: dict[str, str]) -> None:
    assert repr(cbor2.loads(bytes.fromhex(vector["encoding"]))) == vector["value"]


def test_descriptor_presence_and_tasks() -> None:
    message = raw("descriptor", "message")
    assert message[:3] == b"\x01\x01\x02"
    successions, delegation = [message[3:131], message[131:259]], message[259:411]
    for former, following in pairwise([*successions, delegation]):
        assert former[32:64] == following[:32]
        verify(former[:32], "tessera/1 succession", former[64:], former[:64])
    root = delegation[:32]
    assert root == raw("keys", "root_public")
    assert hashlib.sha256(b"tessera/1 root\x00" + root).digest()[:16] == raw(
        "keys", "root_fingerprint"
    )
    verify(root, "tessera/1 delegation", delegation[88:], delegation[:88])
    assert struct.unpack("<QQQ", delegation[64:88]) == (7, 106, 1_800_000_000 + 365 * 86_400)
    verify(delegation[32:64], "tessera/1 descriptor", message[411:475], message[2:411] + BODY)
    fields = cbor2.loads(BODY)
    assert (fields["serial"], fields["expires"]) == (7, 1_800_086_400)
    digest = hashlib.sha256(message).digest()
    assert digest == raw("descriptor", "digest")

    message = raw("presence", "message")
    assert message[:2] == b"\x01\x02"
    verify(fields["signing"], "tessera/1 presence", message[2:66], digest + message[66:])
    assert cbor2.loads(message[66:])["incarnation"] == raw("presence", "incarnation")

    message = raw("tasks", "message")
    assert message[:2] == b"\x01\x09"
    verify(fields["signing"], "tessera/1 tasks", message[2:66], digest + message[66:])
    assert cbor2.loads(message[66:]) == {
        "incarnation": raw("presence", "incarnation"),
        "revision": 1,
        "tasks": [{"task": "films", "cohort": "all"}, {"task": "movies", "cohort": "all"}],
    }


def test_code() -> None:
    text = str(VECTORS["enrolment"]["code"])
    assert [len(group) for group in text.split("-")] == [8] * 11
    code = base64.b32decode(text.replace("-", ""))
    assert code[:16] == raw("keys", "root_fingerprint")
    assert code[16:24] == raw("enrolment", "token_id")
    assert code[24:40] == raw("enrolment", "secret")
    assert code[40:45] == (7).to_bytes(5, "little")
    assert code[45:50] == (1_800_000_000 - 3600).to_bytes(5, "little")
    checked = hashlib.sha256(b"tessera/1 enrolment code\x00" + code[:50]).digest()
    assert code[50:] == checked[:5]


def test_enrolment() -> None:
    secret, request = raw("enrolment", "secret"), raw("enrolment", "request")
    digest = raw("descriptor", "digest")
    head, tag, sealed = request[:58], request[58:74], request[74:]
    fresh = raw("presence", "incarnation") + struct.pack("<Q", VECTORS["enrolment"]["counter"])
    named = b"\x01\x03" + struct.pack("<Q", 7) + raw("enrolment", "token_id")
    assert head[:18] == named and head[34:] == fresh
    label = b"tessera/1 enrol admission\x00"
    assert tag == hmac.digest(secret, label + head + sealed, "sha256")[:16]
    info = b"tessera/1 enrol" + digest + fresh
    signed, body = unseal(raw("keys", "hpke_seed"), info, sealed)
    fields = cbor2.loads(body)
    verify(fields["identity"], "tessera/1 enrol request", signed, info + body)
    requester = hashlib.sha256(b"tessera/1 requester\x00" + fields["identity"]).digest()[:16]
    assert head[18:34] == requester
    covered = fields["token"] + fields["identity"] + fields["mailbox"] + fields["secret"]
    proof = hmac.digest(secret, b"tessera/1 enrol proof\x00" + info + covered, "sha256")
    assert fields["proof"] == proof

    answer = raw("enrolment", "answer")
    asked = hashlib.sha256(request).digest()
    key = hkdf(fields["secret"], asked, b"tessera/1 enrol answer", 32)
    opened = ChaCha20Poly1305(key).decrypt(answer[2:14], answer[14:], answer[:2])
    signing = cbor2.loads(BODY)["signing"]
    verify(signing, "tessera/1 enrol answer", opened[:64], asked + opened[64:])
    granted = cbor2.loads(opened[64:])
    assert granted["time"] == 1_800_000_000
    assert granted["verdict"] == {
        "admission": raw("enrolment", "admission_key"),
        "device": raw("enrolment", "device_id"),
        "handle": raw("enrolment", "handle"),
        "shard": 0,
    }


def test_session() -> None:
    opening, reply = raw("session", "open"), raw("session", "reply")
    head, tag, sealed = opening[:34], opening[34:50], opening[50:]
    fresh = raw("presence", "incarnation") + struct.pack("<Q", VECTORS["session"]["counter"])
    assert head == b"\x01\x05" + struct.pack("<Q", 7) + fresh
    label = b"tessera/1 session open admission\x00"
    key = raw("enrolment", "admission_key")
    assert tag == hmac.digest(key, label + head + sealed, "sha256")[:16]
    info = b"tessera/1 open" + raw("descriptor", "digest") + fresh
    signed, body = unseal(raw("keys", "hpke_seed"), info, sealed)
    asked = cbor2.loads(body)
    identity = cbor2.loads(
        unseal(
            raw("keys", "hpke_seed"),
            raw("enrolment", "hpke_info"),
            raw("enrolment", "request")[74:],
        )[1]
    )["identity"]
    verify(identity, "tessera/1 session open", signed, info + body)
    assert asked["device"] == raw("enrolment", "device_id")

    assert reply[:2] == b"\x01\x06"
    digest = hashlib.sha256(opening).digest()
    signed, body = unseal(raw("session", "ephemeral_seed"), b"tessera/1 reply" + digest, reply[2:])
    sessions = cbor2.loads(BODY)["sessions"]
    verify(sessions, "tessera/1 session reply", signed, digest + body)
    answered = cbor2.loads(body)
    assert answered["incarnation"] == raw("presence", "incarnation")
    assert [entry["epoch"] for entry in answered["keys"]] == [1, 2]

    salt = hashlib.sha256(opening + reply).digest()
    both = asked["secret"] + answered["secret"]
    directions = {
        "up": (hkdf(both, salt, b"tessera/1 device to aggregator", 44), b"\x01"),
        "down": (hkdf(both, salt, b"tessera/1 aggregator to device", 44), b"\x02"),
    }
    for sequence, envelope in zip((0, 1, 0), VECTORS["session"]["envelopes"], strict=True):
        material, direction = directions[envelope["direction"]]
        message = bytes.fromhex(envelope["message"])
        length = 40 if "fragment" in envelope else 20
        assert message[:4] == bytes([1, envelope["type"], "fragment" in envelope, 0])
        assert message[4:20] == answered["session"] + struct.pack("<Q", sequence)
        counter = struct.pack("<Q", sequence) + bytes(4)
        nonce = bytes(a ^ b for a, b in zip(material[32:], counter, strict=True))
        padded = ChaCha20Poly1305(material[:32]).decrypt(
            nonce, message[length:], message[:length] + direction
        )
        payload = bytes.fromhex(envelope["payload"])
        assert padded == payload + b"\x80" + bytes(127 - len(payload))


def test_cohort() -> None:
    found = VECTORS["cohort"]
    info = b"tessera/1 cohort" + b"\x06\x00movies" + b"\x04\x00near" + raw("cohort", "broadcast_id")
    wrapped = []
    for member in found["admission_keys"]:
        derived = hkdf(bytes.fromhex(member), bytes(32), info, 40)
        key, label = derived[:32], derived[32:]
        sealed = ChaCha20Poly1305(key).encrypt(bytes(12), raw("cohort", "cohort_key"), label)
        wrapped.append((label + sealed).hex())
    assert found["wrapped"] == sorted(wrapped)


def test_broadcast() -> None:
    broadcast_id = raw("broadcast", "broadcast_id")
    context = b"tessera/1 broadcast" + b"\x06\x00movies" + b"\x03\x00all" + struct.pack("<Q", 2)
    group = raw("broadcast", "group_key")
    manifest = raw("broadcast", "manifest")
    head = b"\x01\x07" + struct.pack("<Q", 2) + broadcast_id
    assert manifest[:42] == head
    cipher = ChaCha20Poly1305(hkdf(group, broadcast_id, context + b"manifest", 32))
    opened = cipher.decrypt(bytes(12), manifest[42:], head)
    signing = cbor2.loads(BODY)["signing"]
    verify(signing, "tessera/1 manifest", opened[:64], head + opened[64:])
    assert opened[64:] == raw("broadcast", "manifest_body")
    cipher = ChaCha20Poly1305(hkdf(group, broadcast_id, context + b"chunks", 32))
    for index, chunk in enumerate(VECTORS["broadcast"]["chunks"]):
        message = bytes.fromhex(chunk["message"])
        assert message[:38] == b"\x01\x08" + struct.pack("<I", index) + broadcast_id
        assert hashlib.sha256(message).hexdigest() == chunk["sha256"]
        nonce = index.to_bytes(12, "little")
        assert cipher.decrypt(nonce, message[38:], message[:38]).hex() == chunk["payload"]
