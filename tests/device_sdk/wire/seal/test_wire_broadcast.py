from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType, prefix
from device_sdk.wire.seal.broadcast import (
    MAX_CHUNK_PAYLOAD_BYTES,
    MAX_MANIFEST_BODY_BYTES,
    BroadcastKeys,
    GroupKey,
    Publication,
    derive_broadcast_keys,
    new_group_key,
    open_chunk,
    open_manifest,
    read_chunk_index,
    read_manifest_label,
)
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES
from tests.fakes.parties import SeededBytes, key_from
from tests.fakes.refusals import changed_bytes, reason_of

GROUP = new_group_key(7, SeededBytes("group"))
SIGNING = key_from("signing")
PUBLIC = SIGNING.public_key()


def publication(seed: str = "1", group: GroupKey = GROUP) -> Publication:
    return Publication(group, "movies", "k64", SeededBytes(seed))


def keys_of(made: Publication) -> BroadcastKeys:
    return derive_broadcast_keys(GROUP, made.broadcast_id, "movies", "k64")


@given(st.lists(st.binary(max_size=200), max_size=5), st.binary(max_size=300))
def test_round_trip(payloads: list[bytes], body: bytes) -> None:
    made = publication()
    chunks = [made.seal_chunk(payload) for payload in payloads]
    manifest = made.seal_manifest(body, SIGNING)
    label = read_manifest_label(manifest)
    assert (label.epoch, label.broadcast_id) == (7, made.broadcast_id)
    keys = keys_of(made)
    assert open_manifest(manifest, keys, PUBLIC) == body
    for index, (chunk, payload) in enumerate(zip(chunks, payloads, strict=True)):
        digest = hashlib.sha256(chunk).digest()
        assert read_chunk_index(chunk) == index
        assert open_chunk(chunk, keys, made.broadcast_id, index, digest) == payload


def test_every_changed_byte_of_a_manifest_is_refused() -> None:
    made = publication()
    manifest, keys = made.seal_manifest(b"body", SIGNING), keys_of(made)
    for place, changed in changed_bytes(manifest):
        expected = ["bad-version", "bad-type"][place] if place < 2 else "bad-tag"
        assert reason_of(open_manifest, changed, keys, PUBLIC) == expected
    assert reason_of(open_manifest, manifest[:-1], keys, PUBLIC) == "bad-tag"
    assert reason_of(open_manifest, manifest[:100], keys, PUBLIC) == "truncated"
    assert reason_of(open_manifest, bytes(MAX_MESSAGE_BYTES + 1), keys, PUBLIC) == "too-large"
    for epoch in (2**63, 2**64 - 1):
        above = manifest[:2] + epoch.to_bytes(8, "little") + manifest[10:]
        assert reason_of(read_manifest_label, above) == "bad-field"


def test_the_highest_epoch_is_one() -> None:
    made = publication(group=new_group_key(2**63 - 1, SeededBytes("last")))
    assert read_manifest_label(made.seal_manifest(b"", SIGNING)).epoch == 2**63 - 1


def test_the_group_key_alone_makes_no_manifest() -> None:
    made = publication()
    forged = made.seal_manifest(b"body", key_from("an enrolled device"))
    assert reason_of(open_manifest, forged, keys_of(made), PUBLIC) == "bad-signature"


def test_every_changed_byte_of_a_chunk_is_refused() -> None:
    made = publication()
    chunk, keys, broadcast_id = made.seal_chunk(b"payload"), keys_of(made), made.broadcast_id
    digest = hashlib.sha256(chunk).digest()
    for place in range(len(chunk)):
        changed = bytes([*chunk[:place], chunk[place] ^ 1, *chunk[place + 1 :]])
        expected = ["bad-version", "bad-type"][place] if place < 2 else "wrong-chunk"
        assert reason_of(open_chunk, changed, keys, broadcast_id, 0, digest) == expected
        if place >= 38:  # even with the manifest naming it, the tag has to be right
            own = hashlib.sha256(changed).digest()
            assert reason_of(open_chunk, changed, keys, broadcast_id, 0, own) == "bad-tag"
    assert reason_of(open_chunk, chunk, keys, broadcast_id, 1, digest) == "wrong-chunk"
    assert reason_of(open_chunk, chunk, keys, bytes(32), 0, digest) == "wrong-chunk"
    assert reason_of(open_chunk, chunk, keys, broadcast_id, 0, bytes(32)) == "wrong-chunk"


def test_keys_differ_by_all_of_their_inputs() -> None:
    made = [
        derive_broadcast_keys(GROUP, bytes(32), "ab", "c"),
        derive_broadcast_keys(GROUP, bytes(32), "a", "bc"),
        derive_broadcast_keys(GROUP, bytes(32), "ab", ""),
        derive_broadcast_keys(GROUP, b"\x01" + bytes(31), "ab", "c"),
        derive_broadcast_keys(GroupKey(8, GROUP.key), bytes(32), "ab", "c"),
        derive_broadcast_keys(GroupKey(7, bytes(32)), bytes(32), "ab", "c"),
    ]
    assert len({key for keys in made for key in (keys.manifest, keys.chunks)}) == 12
    assert made[0].manifest.hex() not in repr(made[0])
    with pytest.raises(ValueError, match="broadcast id"):
        derive_broadcast_keys(GROUP, b"", "", "")


def test_a_publication_never_seals_two_contents_under_one_nonce() -> None:
    made = publication()
    chunks = [made.seal_chunk(bytes(16)) for _ in range(300)]
    # Without head and tag, which differ by the index in the head: zeros show the key stream.
    assert len({chunk[38:-16] for chunk in chunks}) == 300
    made.seal_manifest(b"body", SIGNING)
    with pytest.raises(ValueError, match="one manifest"):
        made.seal_manifest(b"other", SIGNING)
    with pytest.raises(ValueError, match="not be named"):
        made.seal_chunk(b"x")
    assert Publication(GROUP, "a", "b").broadcast_id != Publication(GROUP, "a", "b").broadcast_id


def test_the_largest_of_both_fit_the_message_limit() -> None:
    made = publication()
    chunk = made.seal_chunk(bytes(MAX_CHUNK_PAYLOAD_BYTES))
    assert len(chunk) == MAX_MESSAGE_BYTES
    with pytest.raises(ValueError, match="at most"):
        made.seal_chunk(bytes(MAX_CHUNK_PAYLOAD_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        made.seal_manifest(bytes(MAX_MANIFEST_BODY_BYTES + 1), SIGNING)
    manifest = made.seal_manifest(bytes(MAX_MANIFEST_BODY_BYTES), SIGNING)
    assert len(manifest) == MAX_MESSAGE_BYTES
    assert len(open_manifest(manifest, keys_of(made), PUBLIC)) == MAX_MANIFEST_BODY_BYTES


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    keys = keys_of(publication())
    for message in (data, prefix(MessageType.MANIFEST) + data):
        with pytest.raises(WireError):
            open_manifest(message, keys, PUBLIC)
    for message in (data, prefix(MessageType.CHUNK) + data):
        with pytest.raises(WireError):
            open_chunk(message, keys, bytes(32), 0, hashlib.sha256(message).digest())
