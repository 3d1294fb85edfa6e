"""The recorded vectors of placement.json, regenerated and recomputed from the primitives alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.seal.placement import Placement
from tests.vectors import generate_placement

VECTORS: dict[str, Any] = json.loads(generate_placement.FILE.read_text(encoding="utf-8"))
SEALING: dict[str, Any] = json.loads(generate_placement._SEALING.read_text(encoding="utf-8"))


def test_the_script_gives_the_recorded_file() -> None:
    assert generate_placement.FILE.read_text(encoding="utf-8") == generate_placement.text()


def test_shards() -> None:
    for entry in VECTORS["shards"]:
        digest = hashlib.sha256(b"tessera/1 shard\x00" + bytes.fromhex(entry["device_id"])).digest()
        assert entry["shard"] == (digest[0] | digest[1] << 8) & 0xFFF


def test_placements() -> None:
    assert VECTORS["placements"]["type"] == 21
    for entry in VECTORS["placements"]["records"]:
        cell = {"cell": entry["cell"]} if entry["cell"] else {}
        assert cbor2.loads(bytes.fromhex(entry["payload"])) == {"shard": entry["shard"], **cell}
    for payload in VECTORS["no_cells"]:
        with pytest.raises(WireError, match="bad-field"):
            decode(Placement, bytes.fromhex(payload))


def test_a_grant_with_a_cell() -> None:
    entry, enrolment = VECTORS["grant_with_a_cell"], SEALING["enrolment"]
    grant = cbor2.loads(bytes.fromhex(entry["answer_body"]))["verdict"]
    assert grant == {
        "admission": bytes.fromhex(enrolment["admission_key"]),
        "cell": entry["cell"],
        "device": bytes.fromhex(enrolment["device_id"]),
        "handle": bytes.fromhex(enrolment["handle"]),
        "shard": entry["shard"],
    }


@pytest.mark.parametrize("waits", [False, True])
def test_no_session(waits: bool) -> None:
    said = {name: bytes.fromhex(text) for name, text in VECTORS["no_session"].items()}
    message, body = said["message"], said["session_id"] + said["incarnation"]
    milliseconds = 0
    if waits:
        later = VECTORS["no_session_for_a_while"]
        message, milliseconds = bytes.fromhex(later["message"]), later["milliseconds"]
    body += milliseconds.to_bytes(4, "little")
    assert message[:-64] == b"\x01\x0a" + body
    signing = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SEALING["keys"]["signing_seed"]))
    covered = bytes.fromhex(SEALING["descriptor"]["digest"]) + said["handle"] + body
    signing.public_key().verify(message[-64:], b"tessera/1 no session\x00" + covered)
