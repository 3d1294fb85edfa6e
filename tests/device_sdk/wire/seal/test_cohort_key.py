"""A cohort's key reaches its members and nobody else."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.broadcast import WRAPPED_BYTES, unwrap_cohort_key, wrap_cohort_key

KEY = bytes(range(32))
BROADCAST = b"\xbc" * 32
MEMBERS = [bytes([number]) * 32 for number in range(5)]


@given(st.permutations(MEMBERS))
def test_members_find_their_entry_and_others_none(members: list[bytes]) -> None:
    wrapped = wrap_cohort_key(KEY, members[:3], "films", "near", BROADCAST)
    assert list(wrapped) == sorted(wrapped)  # the order says nothing about who is who
    assert all(len(entry) == WRAPPED_BYTES for entry in wrapped)
    for place, member in enumerate(members):
        found = unwrap_cohort_key(wrapped, member, "films", "near", BROADCAST)
        assert found == (KEY if place < 3 else None)


@pytest.mark.parametrize(
    ("task", "cohort", "broadcast_id"),
    [("films", "near", b"\xbd" * 32), ("films", "far", BROADCAST), ("filmsn", "ear", BROADCAST)],
)
def test_an_entry_is_for_one_cohort_of_one_publication(
    task: str, cohort: str, broadcast_id: bytes
) -> None:
    wrapped = wrap_cohort_key(KEY, MEMBERS, "films", "near", BROADCAST)
    assert unwrap_cohort_key(wrapped, MEMBERS[0], task, cohort, broadcast_id) is None


def test_a_changed_entry_is_refused() -> None:
    (entry,) = wrap_cohort_key(KEY, MEMBERS[:1], "films", "near", BROADCAST)
    broken = entry[:-1] + bytes([entry[-1] ^ 1])
    with pytest.raises(WireError, match="bad-tag"):
        unwrap_cohort_key([broken], MEMBERS[0], "films", "near", BROADCAST)
    with pytest.raises(ValueError, match="32 bytes"):
        wrap_cohort_key(KEY[1:], MEMBERS, "films", "near", BROADCAST)


def test_an_entry_is_what_the_document_says() -> None:
    """HKDF by hand: extract with a salt of zeros, expand twice, and the cipher of the page."""
    info = b"tessera/1 cohort" + b"\x05\x00films" + b"\x04\x00near" + BROADCAST
    extracted = hmac.digest(bytes(32), MEMBERS[3], hashlib.sha256)
    first = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
    second = hmac.digest(extracted, first + info + b"\x02", hashlib.sha256)
    label = second[:8]
    sealed = ChaCha20Poly1305(first).encrypt(bytes(12), KEY, label)
    assert wrap_cohort_key(KEY, [MEMBERS[3]], "films", "near", BROADCAST) == (label + sealed,)
