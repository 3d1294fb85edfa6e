"""Contents and sets of chunks: cut, sealed, collected in any order, and what is refused."""

from __future__ import annotations

import hashlib
import struct
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.content import (
    HEAD_INDEX,
    SHARED,
    ContentHead,
    ContentKind,
    open_content_head,
    seal_content,
)
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    MAX_BODY_BYTES,
    MOST_CHUNKS,
    ChunkSet,
    seal_chunks,
)
from device_sdk.wire.seal.broadcast import (
    BroadcastKeys,
    Publication,
    derive_broadcast_keys,
    new_group_key,
    open_manifest,
)
from tests.fakes.parties import SeededBytes, key_from
from tests.fakes.refusals import reason_of

GROUP = new_group_key(7, SeededBytes("group"))
SIGNING = key_from("signing")
CONTENT_ID = bytes(range(32))
PLAINTEXT = SeededBytes("content")(1000)
# Cut as a large one is, without its time: three whole chunks and a rest.
LARGE = struct.pack("<Q", 7) * (3 * CHUNK_BYTES // 8) + b"rest"


def publication(seed: str = "1") -> Publication:
    return Publication(GROUP, "movies", "k64", SeededBytes(seed))


def keys_of(made: Publication) -> BroadcastKeys:
    return derive_broadcast_keys(GROUP, made.broadcast_id, "movies", "k64")


def collected(made: Publication, digests: tuple[bytes, ...], length: int) -> ChunkSet:
    return ChunkSet(keys_of(made), made.broadcast_id, digests, length)


@settings(max_examples=20)
@given(
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(LARGE)]), st.data()
)
def test_chunks_make_the_whole_in_any_order(length: int, data: st.DataObject) -> None:
    made, plaintext = publication(), LARGE[:length]
    messages, digests = seal_chunks(made, plaintext)
    assert digests == tuple(hashlib.sha256(each).digest() for each in messages)
    chunks = collected(made, digests, length)
    order = data.draw(st.permutations(range(len(messages))))
    for left, index in zip(range(len(messages), 0, -1), order, strict=True):
        assert chunks.missing == left
        with pytest.raises(ValueError, match=f"{left} chunks are missing"):
            chunks.plaintext()
        assert chunks.add(messages[index]) == (left == 1)
        assert chunks.add(messages[index]) == (left == 1)  # one more time: ignored
    assert chunks.missing == 0
    assert chunks.plaintext() == plaintext


def test_a_chunk_that_the_manifest_does_not_name_is_refused_and_changes_nothing() -> None:
    made, other = publication(), publication("2")
    messages, digests = seal_chunks(made, LARGE)
    chunks = collected(made, digests[:3], 3 * CHUNK_BYTES)
    (foreign, *_), _ = seal_chunks(other, LARGE)
    assert reason_of(chunks.add, messages[3]) == "wrong-chunk"  # beyond the last
    assert reason_of(chunks.add, foreign) == "wrong-chunk"
    assert reason_of(chunks.add, messages[0][:-1] + bytes([messages[0][-1] ^ 1])) == "wrong-chunk"
    assert reason_of(chunks.add, b"") == "truncated"
    assert chunks.missing == 3
    # The manifest names it, and yet it was sealed under other keys.
    strange = ChunkSet(keys_of(other), made.broadcast_id, digests, len(LARGE))
    assert reason_of(strange.add, messages[0]) == "bad-tag"


def test_a_length_that_the_chunks_do_not_make_is_refused() -> None:
    made = publication()
    messages, digests = seal_chunks(made, PLAINTEXT)
    for length in (len(PLAINTEXT) - 1, len(PLAINTEXT) + 1):
        chunks = collected(made, digests, length)
        assert chunks.add(messages[0])
        assert reason_of(chunks.plaintext) == "wrong-length"
    for length in (0, CHUNK_BYTES + 1):
        with pytest.raises(ValueError, match="1 chunks for"):
            collected(made, digests, length)


@pytest.mark.parametrize("kind", ContentKind)
def test_a_content_is_a_head_and_its_chunks(kind: ContentKind) -> None:
    made = publication()
    messages = seal_content(made, SIGNING, kind, CONTENT_ID, LARGE)
    body = open_manifest(messages[HEAD_INDEX], keys_of(made), SIGNING.public_key())
    head = decode(ContentHead, body)
    assert (head.kind, head.content_id, head.length) == (kind, CONTENT_ID, len(LARGE))
    chunks = collected(made, head.chunks, head.length)
    for message in messages[1:]:
        chunks.add(message)
    assert chunks.plaintext() == LARGE


def test_a_head_is_opened_by_whom_it_is_sealed_for() -> None:
    public = SIGNING.public_key()
    for names in (("movies", "k64"), SHARED):
        made = Publication(GROUP, *names, SeededBytes("shared"))
        message, *_ = seal_content(made, SIGNING, ContentKind.CATALOGUE, CONTENT_ID, PLAINTEXT)
        own = [("movies", "k64"), SHARED]
        head, keys = open_content_head(message, GROUP, own, public)
        assert head.content_id == CONTENT_ID
        assert keys == derive_broadcast_keys(GROUP, made.broadcast_id, *names)
        others = [("movies", "k65"), ("films", "k64")]
        assert reason_of(open_content_head, message, GROUP, others, public) == "bad-tag"
        forger = Ed25519PrivateKey.generate().public_key()
        assert reason_of(open_content_head, message, GROUP, own, forger) == "bad-signature"


def test_a_head_is_these_bytes() -> None:
    """Fields and names as docs/wire.md gives them."""
    digest = b"d" * 32
    head = ContentHead(ContentKind.ATTACHMENT, CONTENT_ID, 9, (digest,))
    body = cbor.encode(
        {"chunks": [digest], "content": CONTENT_ID, "kind": "attachment", "length": 9}
    )
    assert encode(head) == body
    assert decode(ContentHead, body) == head


def test_a_content_of_one_byte_is_one() -> None:
    head = ContentHead(ContentKind.CATALOGUE, CONTENT_ID, 1, (bytes(32),))
    assert decode(ContentHead, encode(head)) == head


def test_the_largest_head_fits_a_body() -> None:
    chunks = (bytes(32),) * MOST_CHUNKS
    head = ContentHead(ContentKind.CATALOGUE, CONTENT_ID, CHUNK_BYTES * MOST_CHUNKS, chunks)
    assert len(encode(head)) <= MAX_BODY_BYTES
    assert decode(ContentHead, encode(head)) == head


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"content": bytes(31)}, "content_id"),
        ({"content": bytes(33)}, "content_id"),
        ({"length": 0}, "from 1 to"),
        ({"length": 0, "chunks": []}, "from 1 to"),
        ({"length": CHUNK_BYTES * MOST_CHUNKS + 1}, "from 1 to"),
        ({"length": CHUNK_BYTES + 1}, "1 chunks for"),
        ({"chunks": []}, "0 chunks for"),
        ({"chunks": [bytes(31)]}, r"chunks\[0\]"),
        ({"chunks": [bytes(33)]}, r"chunks\[0\]"),
        ({"kind": "other"}, None),
        ({"kind": "a" * 17}, None),
        ({"kind": 3}, None),
        ({"chunks": [3]}, None),
        ({"chunks": [bytes(32), 3]}, None),
        ({"length": -1}, None),
        ({"more": 1}, None),
    ],
)
def test_a_wrong_head_is_refused_at_both_ends(wrong: dict[str, cbor.CborValue], match: str) -> None:
    right = {"chunks": [bytes(32)], "content": CONTENT_ID, "kind": "artifact", "length": 9}
    value: dict[str, cbor.CborValue] = {**right, **wrong}
    expected = "wrong-fields" if "more" in wrong else "bad-field"
    assert reason_of(partial(decode, ContentHead), cbor.encode(value)) == expected
    if match is not None:
        length, digests, content_id = (value[name] for name in ("length", "chunks", "content"))
        assert isinstance(length, int) and isinstance(digests, list)
        assert isinstance(content_id, bytes)
        with pytest.raises(ValueError, match=match):
            ContentHead(ContentKind.ARTIFACT, content_id, length, tuple(digests))  # type: ignore[arg-type]


@given(st.binary(max_size=100))
def test_random_bodies_never_escape_as_another_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(ContentHead, body)
    with pytest.raises(WireError):
        decode(ContentHead, bytes(MAX_BODY_BYTES + 1))
