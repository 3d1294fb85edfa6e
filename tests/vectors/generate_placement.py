"""Write placement.json: test vectors of shards, placements, and denied sessions.

    python tests/vectors/generate_placement.py [--check]

Keys, descriptor and handle are those of sealing.json. ``--check`` writes nothing and fails when the
file would change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.seal.descriptor import read_descriptor
from device_sdk.wire.seal.enrolment_message import EnrolAnswer, Grant
from device_sdk.wire.seal.handshake import sign_no_session
from device_sdk.wire.seal.keys import signing_key
from device_sdk.wire.seal.placement import Placement, shard_of
from tests.vectors.written import write

FILE = Path(__file__).with_name("placement.json")
_SEALING = Path(__file__).with_name("sealing.json")
WAIT_MILLISECONDS = 71_250
DEVICES = tuple(bytes((number,)) * 16 for number in range(8))
PLACEMENTS = (
    Placement(0),
    Placement(4095),
    Placement(1234, "north.fleet.example"),
    Placement(1234, "north.fleet.example:8883"),
    Placement(5, "192.0.2.7:1883"),
)


def build() -> dict[str, Any]:
    """The file's content; bytes in hexadecimal."""
    sealing = json.loads(_SEALING.read_text(encoding="utf-8"))
    keys, enrolment = sealing["keys"], sealing["enrolment"]
    descriptor = read_descriptor(
        bytes.fromhex(sealing["descriptor"]["message"]), bytes.fromhex(keys["root_fingerprint"])
    )
    signing = signing_key(bytes.fromhex(keys["signing_seed"]))
    device_id, handle, admission, session, life = (
        bytes.fromhex(text)
        for text in (
            enrolment["device_id"],
            enrolment["handle"],
            enrolment["admission_key"],
            sealing["session"]["session_id"],
            sealing["presence"]["incarnation"],
        )
    )
    at = PLACEMENTS[3]
    grant = Grant(device_id, handle, admission, at.shard, at.cell)
    answer = encode(EnrolAnswer(grant, enrolment["time_unix_seconds"]))
    return {
        "shards": [{"device_id": each.hex(), "shard": shard_of(each)} for each in DEVICES],
        "placements": {
            "type": int(RecordType.PLACEMENT),
            "records": [
                {"shard": each.shard, "cell": each.cell, "payload": encode(each).hex()}
                for each in PLACEMENTS
            ],
        },
        "grant_with_a_cell": {"shard": at.shard, "cell": at.cell, "answer_body": answer.hex()},
        "no_session": {
            "session_id": session.hex(),
            "incarnation": life.hex(),
            "handle": handle.hex(),
            "message": sign_no_session(session, life, handle, descriptor, signing).hex(),
        },
        "no_session_for_a_while": {
            "milliseconds": WAIT_MILLISECONDS,
            "message": sign_no_session(
                session, life, handle, descriptor, signing, WAIT_MILLISECONDS / 1000
            ).hex(),
        },
        "no_cells": [cbor.encode({"cell": text, "shard": 1}).hex() for text in ("", "a:0", "A")],
    }


def text() -> str:
    """The file's content, as text."""
    return json.dumps(build(), indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write(FILE, text()))
