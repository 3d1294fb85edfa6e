from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.receipts import (
    Receipt,
    UpdateIdentity,
    Verdict,
    read_update,
    update_digest,
    write_receipt,
    write_update,
)

IDENTITY = UpdateIdentity(b"device", "films", 1_700_000_000, 7)
NUMBERS = st.integers(0, 2**63 - 1)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", fullmatch=True)
REASONS = st.from_regex(r"[a-z]{1,8}(-[a-z0-9]{1,8}){0,3}", fullmatch=True)


@given(st.binary(min_size=1, max_size=32), NAMES, NUMBERS, NUMBERS, st.binary(max_size=50))
def test_update_round_trip(
    device_id: bytes, task: str, generation: int, round_number: int, body: bytes
) -> None:
    identity = UpdateIdentity(device_id, task, generation, round_number)
    update = read_update(write_update(identity, body), device_id)
    assert update.identity == identity
    assert update.body == body
    assert update.body_sha256 == hashlib.sha256(body).digest()


@given(st.binary(max_size=80))
def test_any_bytes_are_an_update_or_refused(payload: bytes) -> None:
    try:
        update = read_update(payload, b"device")
    except WireError:
        return
    assert write_update(update.identity, update.body) == payload


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (bytes(16), "truncated"),
        (bytes(16) + b"\x02a", "truncated"),
        (bytes(16) + b"\x00", "bad-name"),
        (bytes(16) + b"\x01A", "bad-name"),
        (bytes(16) + b"\x01\xff", "bad-name"),
        (bytes(16) + b"\x01\n", "bad-name"),
        (b"\xff" * 8 + bytes(8) + b"\x01a", "bad-field"),
    ],
)
def test_malformed_updates_are_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        read_update(payload, b"device")
    assert caught.value.reason == reason


def test_digest_binds_every_part_of_the_identity_and_the_body() -> None:
    body = hashlib.sha256(b"body").digest()
    digests = {
        update_digest(identity, body)
        for identity in (
            IDENTITY,
            replace(IDENTITY, device_id=b"devic"),
            replace(IDENTITY, task="film"),
            replace(IDENTITY, generation=1),
            replace(IDENTITY, round=8),
        )
    } | {update_digest(IDENTITY, hashlib.sha256(b"other").digest())}
    assert len(digests) == 6
    with pytest.raises(ValueError, match="32 bytes"):
        update_digest(IDENTITY, b"short")


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_id": b""},
        {"device_id": bytes(33)},
        {"task": "a/b"},
        {"round": -1},
        {"generation": 2**63},
    ],
)
def test_impossible_identities_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"device_id|task|round|generation"):
        replace(IDENTITY, **wrong)  # type: ignore[arg-type]


@given(st.binary(min_size=32, max_size=32), st.sampled_from(Verdict), REASONS)
def test_receipt_round_trip(digest: bytes, verdict: Verdict, reason: str) -> None:
    receipt = Receipt(digest, verdict, reason if verdict is Verdict.REFUSED else "")
    assert decode(Receipt, write_receipt(receipt)) == receipt


@given(st.binary(max_size=150))
def test_any_bytes_are_a_receipt_or_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(Receipt, payload)


@given(st.data())
def test_mutated_receipts_are_refused_or_canonical(data: st.DataObject) -> None:
    payload = bytearray(write_receipt(Receipt(bytes(32), Verdict.REFUSED, "bad-rows")))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    try:
        receipt = decode(Receipt, bytes(payload))
    except WireError:
        return
    assert write_receipt(receipt) == bytes(payload)


def test_a_reason_goes_with_a_refusal_only() -> None:
    with pytest.raises(ValueError, match="goes with a refusal"):
        Receipt(bytes(32), Verdict.COUNTED, "why")
    with pytest.raises(ValueError, match="goes with a refusal"):
        Receipt(bytes(32), Verdict.REFUSED, "")
    with pytest.raises(ValueError, match="lower-case words"):
        Receipt(bytes(32), Verdict.REFUSED, "No reason!")
