"""Write sealing.json: test vectors for every message of docs/wire.md.

    python tests/vectors/generate_sealing.py [--check]

All keys and random bytes come from SHA-256 streams, so that a run repeats the last one. HPKE draws
its own randomness: where the file already holds a ciphertext that opens to the same plaintext in
the same context, it is kept; else a new one is made. ``--check`` writes nothing and fails when the
file would change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.announcement import ServedTasks, announce, new_presence
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    Publication,
    derive_broadcast_keys,
    new_group_key,
    open_chunk,
    open_manifest,
    unwrap_cohort_key,
    wrap_cohort_key,
)
from device_sdk.wire.seal.descriptor import (
    Descriptor,
    make_delegation,
    make_descriptor,
    make_succession,
)
from device_sdk.wire.seal.enrolment import EnrolmentAttempt, EnrolmentDesk, Token
from device_sdk.wire.seal.enrolment_message import enrol_info, new_code, parse_code
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.handshake import DeviceCredential, SessionOpening, open_info, reply_info
from device_sdk.wire.seal.keyring import Keyring, ServingKeys, serving_keys
from device_sdk.wire.seal.keys import KeyKind, generate, signing_key
from device_sdk.wire.seal.placement import Placement
from device_sdk.wire.seal.session import Fragment, derive_session_keys
from device_sdk.wire.seal.session_table import RegisteredDevice, SessionTable
from tests.vectors.written import write

PATH = Path(__file__).with_name("sealing.json")
NOW = 1_800_000_000
ENROL_COUNTER, OPEN_COUNTER = 1, 258
Section: TypeAlias = dict[str, object]


class Stream:
    """Random bytes of a name: SHA-256(name || 0x00 || counter), counter 8 bytes little-endian."""

    def __init__(self, name: str) -> None:
        self._name = name.encode() + b"\x00"
        self._left = b""
        self._counter = 0

    def __call__(self, count: int) -> bytes:
        while len(self._left) < count:
            self._left += hashlib.sha256(self._name + self._counter.to_bytes(8, "little")).digest()
            self._counter += 1
        taken, self._left = self._left[:count], self._left[count:]
        return taken


class RecordedSeal:
    """Seals with HPKE, but keeps a recorded ciphertext that still says the same."""

    def __init__(self, recorded: str | None, recipient_seed: bytes) -> None:
        self.sealed = bytes.fromhex(recorded) if recorded else b""
        self._recipient = hpke.private_key(recipient_seed)

    def __call__(self, key: hpke.PublicKey, info: bytes, plaintext: bytes) -> bytes:
        try:
            is_same = hpke.unseal(self._recipient, info, self.sealed) == plaintext
        except WireError:
            is_same = False
        if not is_same:
            self.sealed = hpke.seal(key, info, plaintext)
        return self.sealed


def cbor_vectors() -> list[Section]:
    values: list[cbor.CborValue] = [
        0, 23, 24, 255, 256, 65536, 2**32, 2**64 - 1, -1, -(2**64), None, False, True,
        0.0, -0.0, 1.5, 0.1, 65504.0, 3.4028234663852886e38, 5e-324,
        b"", b"\x01\x02", "", "é", [], [1, [2]], {}, {"a": 2, "b": 1, "aa": 3},
    ]  # fmt: skip
    return [{"value": repr(value), "encoding": cbor.encode(value).hex()} for value in values]


def build(recorded: dict[str, str]) -> Section:
    """All vectors. ``recorded``: HPKE ciphertexts of an earlier run, by name."""
    root = signing_key(generate(KeyKind.ED25519, Stream("root")))
    signing = signing_key(generate(KeyKind.ED25519, Stream("signing")))
    sessions = signing_key(generate(KeyKind.ED25519, Stream("sessions")))
    identity = signing_key(generate(KeyKind.ED25519, Stream("identity")))
    hpke_seed = generate(KeyKind.HPKE, Stream("hpke"))
    delegate = signing_key(generate(KeyKind.ED25519, Stream("delegate")))
    roots = [signing_key(generate(KeyKind.ED25519, Stream(f"former root {n}"))) for n in (1, 2)]
    successions = [
        make_succession(old, new.public_key().public_bytes_raw())
        for old, new in pairwise([*roots, root])
    ]
    delegation = make_delegation(
        root, delegate.public_key().public_bytes_raw(), 7, 106, NOW + 365 * 86_400
    )
    descriptor = make_descriptor(
        delegate,
        delegation,
        7,
        NOW,
        NOW + 86_400,
        signing.public_key().public_bytes_raw(),
        sessions.public_key().public_bytes_raw(),
        hpke.public_bytes(hpke_seed),
        successions,
    )
    keyring = Keyring([serving_keys(descriptor, signing, sessions, hpke_seed)])
    presence = new_presence(NOW - 60, Stream("incarnation"))
    served = ServedTasks(presence.incarnation, 1, (("films", "all"), ("movies", "all")))
    group_keys = (new_group_key(1, Stream("group 1")), new_group_key(2, Stream("group 2")))
    sealed: dict[str, str] = {}
    enrolment, credential = _enrolment(
        descriptor, keyring, hpke_seed, identity, presence.incarnation, recorded, sealed
    )
    session = _session(
        descriptor, keyring, hpke_seed, credential, presence.incarnation, group_keys, recorded,
        sealed,
    )  # fmt: skip
    return {
        "note": "Bytes are hexadecimal. Random bytes: see tests/vectors/generate_sealing.py.",
        "cbor": cbor_vectors(),
        "keys": {
            "root_seed": Stream("root")(32).hex(),
            "root_public": descriptor.root.hex(),
            "root_fingerprint": descriptor.root_fingerprint.hex(),
            "former_root_seeds": [Stream(f"former root {n}")(32).hex() for n in (1, 2)],
            "delegate_seed": Stream("delegate")(32).hex(),
            "signing_seed": Stream("signing")(32).hex(),
            "sessions_seed": Stream("sessions")(32).hex(),
            "hpke_seed": hpke_seed.hex(),
            "identity_seed": Stream("identity")(32).hex(),
        },
        "descriptor": {
            "successions": [each.to_bytes().hex() for each in descriptor.successions],
            "delegation": descriptor.delegation.to_bytes().hex(),
            "first_serial": delegation.first_serial,
            "last_serial": delegation.last_serial,
            "delegation_expires_unix_seconds": delegation.expires_unix_seconds,
            "serial": descriptor.serial,
            "expires_unix_seconds": descriptor.expires_unix_seconds,
            "digest": descriptor.digest.hex(),
            "message": descriptor.message.hex(),
        },
        "presence": {
            "incarnation": presence.incarnation.hex(),
            "started_unix_seconds": presence.started_unix_seconds,
            "message": announce(presence, descriptor, signing).hex(),
        },
        "tasks": {
            "revision": served.revision,
            "tasks": [list(name) for name in served.names],
            "message": announce(served, descriptor, signing).hex(),
        },
        "enrolment": enrolment,
        "session": session,
        "broadcast": _broadcast(group_keys[1], signing),
        "cohort": _cohort(),
        "hpke_sealed": sealed,
    }


def _enrolment(
    descriptor: Descriptor,
    keyring: Keyring[ServingKeys],
    hpke_seed: bytes,
    identity: Ed25519PrivateKey,
    incarnation: bytes,
    recorded: dict[str, str],
    sealed: dict[str, str],
) -> tuple[Section, DeviceCredential]:
    code = new_code(descriptor.root_fingerprint, descriptor.serial, NOW - 3600, Stream("code"))
    seal = RecordedSeal(recorded.get("enrol_request"), hpke_seed)
    freshness = Freshness(incarnation, ENROL_COUNTER)
    attempt = EnrolmentAttempt(
        parse_code(code.to_text()), descriptor, identity, freshness,
        random_bytes=Stream("enrol"), seal=seal,
    )  # fmt: skip
    sealed["enrol_request"] = seal.sealed.hex()
    clock = _still(0.0)
    desk = EnrolmentDesk(
        keyring, incarnation, TokenBuckets(1, 1, clock), WorkBudget(1, clock), _still(NOW),
        placement_of=lambda device_id: Placement(0), random_bytes=Stream("desk"),
    )  # fmt: skip
    outcome = desk.answer(attempt.message, Token(code.token_id, code.secret, NOW + 3600))
    enrolled = attempt.accept(outcome.answer)
    grant = enrolled.grant
    section: Section = {
        "code": code.to_text(),
        "token_id": code.token_id.hex(),
        "secret": code.secret.hex(),
        "least_serial": code.least_serial,
        "made_unix_seconds": code.made_unix_seconds,
        "counter": freshness.counter,
        "hpke_info": enrol_info(descriptor, freshness).hex(),
        "request": attempt.message.hex(),
        "mailbox": attempt.mailbox.hex(),
        "answer": outcome.answer.hex(),
        "device_id": grant.device_id.hex(),
        "handle": grant.handle.hex(),
        "admission_key": grant.admission_key.hex(),
        "shard": grant.shard,
        "time_unix_seconds": enrolled.time_unix_seconds,
    }
    return section, DeviceCredential(grant.device_id, identity, grant.admission_key)


def _session(
    descriptor: Descriptor,
    keyring: Keyring[ServingKeys],
    hpke_seed: bytes,
    credential: DeviceCredential,
    incarnation: bytes,
    group_keys: tuple[GroupKey, ...],
    recorded: dict[str, str],
    sealed: dict[str, str],
) -> Section:
    clock = _still(0.0)
    open_seal = RecordedSeal(recorded.get("session_open"), hpke_seed)
    freshness = Freshness(incarnation, OPEN_COUNTER)
    opening = SessionOpening(
        credential, descriptor, freshness, clock, random_bytes=Stream("open"), seal=open_seal
    )
    drawn = Stream("open")
    ephemeral_seed, device_secret = drawn(hpke.SEED_BYTES), drawn(32)
    reply_seal = RecordedSeal(recorded.get("session_reply"), ephemeral_seed)
    table = SessionTable(
        keyring, incarnation, TokenBuckets(1, 1, clock), WorkBudget(1, clock), clock,
        _still(NOW), random_bytes=Stream("table"), seal=reply_seal,
    )  # fmt: skip
    public = credential.identity.public_key().public_bytes_raw()
    device = RegisteredDevice(credential.device_id, public, credential.admission_key)
    reply = table.accept_open(device, opening.message, group_keys)
    sealed["session_open"] = open_seal.sealed.hex()
    sealed["session_reply"] = reply_seal.sealed.hex()
    session = opening.accept(reply, NOW).session
    answer = Stream("table")
    session_id, aggregator_secret = answer(8), answer(32)
    keys = derive_session_keys(device_secret, aggregator_secret, opening.message, reply)
    up = session.seal(16, b"update")
    fragment = Fragment(b"\x00\x01\x02\x03\x04\x05\x06\x07", 0, 2, 150_000)
    up_fragment = session.seal(16, b"part", fragment)
    table.receive(up, credential.device_id)
    table.receive(up_fragment, credential.device_id)
    down = table.seal(credential.device_id, 17, b"receipt")
    session.open(down)
    return {
        "ephemeral_seed": ephemeral_seed.hex(),
        "device_secret": device_secret.hex(),
        "aggregator_secret": aggregator_secret.hex(),
        "session_id": session_id.hex(),
        "group_keys": [{"epoch": key.epoch, "key": key.key.hex()} for key in group_keys],
        "counter": freshness.counter,
        "open_hpke_info": open_info(descriptor, freshness).hex(),
        "open": opening.message.hex(),
        "reply_hpke_info": reply_info(hashlib.sha256(opening.message).digest()).hex(),
        "reply": reply.hex(),
        "up": {"key": keys.up.key.hex(), "iv": keys.up.iv.hex()},
        "down": {"key": keys.down.key.hex(), "iv": keys.down.iv.hex()},
        "envelopes": [
            {"direction": "up", "type": 16, "payload": b"update".hex(), "message": up.hex()},
            {
                "direction": "up",
                "type": 16,
                "payload": b"part".hex(),
                "fragment": "id 0001020304050607, index 0 of 2, 150000 bytes",
                "message": up_fragment.hex(),
            },
            {"direction": "down", "type": 17, "payload": b"receipt".hex(), "message": down.hex()},
        ],
    }


def _broadcast(group_key: GroupKey, signing: Ed25519PrivateKey) -> Section:
    made = Publication(group_key, "movies", "all", Stream("broadcast"))
    keys = derive_broadcast_keys(group_key, made.broadcast_id, "movies", "all")
    chunks = [made.seal_chunk(payload) for payload in (b"first", b"second")]
    manifest = made.seal_manifest(b"a body", signing)
    open_manifest(manifest, keys, signing.public_key())
    digests = [hashlib.sha256(chunk).digest() for chunk in chunks]
    payloads = [
        open_chunk(chunk, keys, made.broadcast_id, index, digests[index])
        for index, chunk in enumerate(chunks)
    ]
    return {
        "task": "movies",
        "cohort": "all",
        "epoch": group_key.epoch,
        "group_key": group_key.key.hex(),
        "broadcast_id": made.broadcast_id.hex(),
        "manifest_key": keys.manifest.hex(),
        "chunks_key": keys.chunks.hex(),
        "manifest_body": b"a body".hex(),
        "manifest": manifest.hex(),
        "chunks": [
            {"payload": payload.hex(), "message": chunk.hex(), "sha256": digest.hex()}
            for payload, chunk, digest in zip(payloads, chunks, digests, strict=True)
        ],
    }


def _cohort() -> Section:
    key, members, broadcast_id = b"\xc0" * 32, [b"\xa1" * 32, b"\xa2" * 32], b"\xbc" * 32
    wrapped = wrap_cohort_key(key, members, "movies", "near", broadcast_id)
    for member in members:
        assert unwrap_cohort_key(wrapped, member, "movies", "near", broadcast_id) == key
    return {
        "task": "movies",
        "cohort": "near",
        "broadcast_id": broadcast_id.hex(),
        "cohort_key": key.hex(),
        "admission_keys": [member.hex() for member in members],
        "wrapped": [entry.hex() for entry in wrapped],
    }


def _still(seconds: float) -> Callable[[], float]:
    """A clock that stands."""
    return lambda: seconds


def text_of(vectors: Section) -> str:
    """The file's text."""
    return json.dumps(vectors, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    recorded: dict[str, str] = {}
    if PATH.exists():
        recorded = json.loads(PATH.read_text(encoding="utf-8"))["hpke_sealed"]
    return write(PATH, text_of(build(recorded)), arguments)


if __name__ == "__main__":
    sys.exit(main())
