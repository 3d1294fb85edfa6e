"""Attachments are sealed once while they, their readers and the key epoch stay the same."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.publish.publisher import ATTACHMENT_PART, Attachments, SealedOffer
from aggregator.store import TaskStore
from device_sdk.wire.arrays.exchange import Attachment, Broadcast
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.content import ContentHead, ContentKind
from device_sdk.wire.publish.manifest import ChunkSet
from device_sdk.wire.publish.task_messages import read_attachment
from device_sdk.wire.publish.topics import ChunkTopic, Topics
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    derive_broadcast_keys,
    new_group_key,
    open_manifest,
    read_manifest_label,
    unwrap_cohort_key,
)
from device_sdk.wire.seal.keys import KeyKind, generate, signing_key

MEMBERS = {f"{number:032x}": bytes([number]) * 32 for number in range(4)}
NAMES = list(MEMBERS)
SIGNING = signing_key(generate(KeyKind.ED25519))
KEY = new_group_key(3)
VECTOR = {"w": np.arange(6, dtype=np.float32)}


@pytest.fixture
def attachments(tmp_path: Path) -> Attachments:
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom)
    return attached(home.open_store().first, dict(MEMBERS))


def attached(store: TaskStore, members: dict[str, bytes], codec: str = "float32") -> Attachments:
    return Attachments(
        "films", "all", codec, Topics(), store, members.get, os.urandom, np.random.default_rng(1)
    )


def broadcast(cohorts: dict[str, tuple[str, ...]], **attached: Attachment) -> Broadcast:
    named = {name.replace("_", "."): each for name, each in attached.items()}
    return Broadcast(1, 0, {}, attachments=named, cohorts=cohorts)


def seal(
    attachments: Attachments, sent: Broadcast, key: GroupKey = KEY, broadcast_id: bytes = bytes(32)
) -> tuple[SealedOffer, set[str]]:
    """The offer, and the parts that were sealed anew or cleared."""
    store = attachments.store
    before = dict(parts(store))
    with store.database.transaction():
        offer = attachments.seal(sent, broadcast_id, key, SIGNING)
    after = dict(parts(store))
    return offer, {part for part in before | after if before.get(part) != after.get(part)}


def parts(store: TaskStore) -> list[tuple[str, bytes]]:
    rows = store.database.rows(
        "SELECT part, message FROM publications WHERE place = 0 AND message NOT NULL"
    )
    return [(row[0], row[1]) for row in rows]


def opened(attachments: Attachments, content_id: bytes, key: GroupKey, cohort: str) -> bytes:
    """What a device with this key reads."""
    store, topics = attachments.store, attachments.topics

    def message(index: int) -> bytes:
        found = store.fleet.retained.message(topics.write(ChunkTopic(content_id, index)))
        assert found is not None
        return found

    label = read_manifest_label(message(0))
    keys = derive_broadcast_keys(key, label.broadcast_id, "films", cohort)
    head = decode(ContentHead, open_manifest(message(0), keys, SIGNING.public_key()))
    assert (head.kind, head.content_id) == (ContentKind.ATTACHMENT, content_id)
    chunks = ChunkSet(keys, label.broadcast_id, head.chunks, head.length)
    for index in range(len(head.chunks)):
        chunks.add(message(1 + index))
    return chunks.plaintext()


def test_everybodys_attachment_is_read_with_the_group_key(attachments: Attachments) -> None:
    offer, _ = seal(attachments, broadcast({}, public_a=Attachment(VECTOR)))
    (each,) = offer.attachments
    content = opened(attachments, each.content_id, KEY, "all")
    assert (each.name, each.size, each.cohort) == ("public.a", len(content), "")
    np.testing.assert_array_equal(read_attachment(content, "").tensors["w"], VECTOR["w"])


def test_a_cohorts_attachment_is_read_by_its_members_alone(attachments: Attachments) -> None:
    sent = broadcast({"near": (NAMES[0], NAMES[2])}, vector_a=Attachment(VECTOR, "near"))
    offer, _ = seal(attachments, sent, broadcast_id=b"\x05" * 32)
    (each,) = offer.attachments
    for name, admission in MEMBERS.items():
        key = unwrap_cohort_key(offer.cohort_keys["near"], admission, "films", "near", b"\x05" * 32)
        assert (key is not None) == (name in (NAMES[0], NAMES[2]))
    assert key is None  # the last one is no member
    key = unwrap_cohort_key(
        offer.cohort_keys["near"], MEMBERS[NAMES[0]], "films", "near", b"\x05" * 32
    )
    assert key is not None
    content = opened(attachments, each.content_id, GroupKey(KEY.epoch, key), "near")
    assert read_attachment(content, "near").cohort == "near"


def test_members_of_another_cohort_find_no_key(attachments: Attachments) -> None:
    cohorts = {"near": (NAMES[0], NAMES[2]), "far": (NAMES[1],)}
    sent = broadcast(
        cohorts, vector_a=Attachment(VECTOR, "near"), vector_b=Attachment(VECTOR, "far")
    )
    offer, _ = seal(attachments, sent, broadcast_id=b"\x05" * 32)
    found = {
        (cohort, name): unwrap_cohort_key(wrapped, admission, "films", cohort, b"\x05" * 32)
        for cohort, wrapped in offer.cohort_keys.items()
        for name, admission in MEMBERS.items()
    }
    readers = {place for place, key in found.items() if key is not None}
    assert readers == {(cohort, name) for cohort, names in cohorts.items() for name in names}
    # And the key of one does not open what is sealed for the other.
    key = found["far", NAMES[1]]
    assert key is not None
    near, _ = offer.attachments
    for cohort in cohorts:
        with pytest.raises(WireError, match="not sealed under"):
            opened(attachments, near.content_id, GroupKey(KEY.epoch, key), cohort)


def test_only_what_changed_is_sealed_again(attachments: Attachments) -> None:
    other = {"w": VECTOR["w"] + 1}
    near, far = {"near": tuple(NAMES[:2])}, {"near": tuple(NAMES[:3])}
    first, new = seal(
        attachments,
        broadcast(near, public_a=Attachment(VECTOR), vector_a=Attachment(VECTOR, "near")),
    )
    assert len(new) == 2 and all(part.startswith(ATTACHMENT_PART) for part in new)
    assert len({each.content_id for each in first.attachments}) == 2  # other readers, another id
    same = broadcast(near, public_a=Attachment(VECTOR), vector_a=Attachment(VECTOR, "near"))
    again, new = seal(attachments, same, broadcast_id=b"\x01" * 32)
    assert not new and again.attachments == first.attachments
    assert again.cohort_keys != first.cohort_keys  # wrapped for the new broadcast
    # Another member, another cohort key: what the cohort reads is sealed anew, nothing else.
    grown, new = seal(
        attachments,
        broadcast(far, public_a=Attachment(VECTOR), vector_a=Attachment(VECTOR, "near")),
    )
    vector = ATTACHMENT_PART + grown.attachments[1].content_id.hex()
    assert new == {vector} and grown.attachments == first.attachments
    # Other arrays, another content; the one before is cleared.
    changed, new = seal(
        attachments,
        broadcast(far, public_a=Attachment(VECTOR), vector_a=Attachment(other, "near")),
    )
    assert new == {vector, ATTACHMENT_PART + changed.attachments[1].content_id.hex()}
    _, new = seal(
        attachments,
        broadcast(far, public_a=Attachment(VECTOR), vector_a=Attachment(other, "near")),
        key=new_group_key(4),
    )
    assert len(new) == 2  # the group key was rotated
    gone, new = seal(attachments, broadcast({}))
    assert (gone.attachments, len(new), parts(attachments.store)) == ((), 2, [])
    assert len(attachments.store.fleet.retained.superseded()) >= 2


def test_what_is_sealed_is_remembered_by_the_next_process(attachments: Attachments) -> None:
    sent = broadcast({"near": tuple(NAMES[:2])}, vector_a=Attachment(VECTOR, "near"))
    first, _ = seal(attachments, sent)
    again, new = seal(attached(attachments.store, dict(MEMBERS)), sent)
    assert not new and again.attachments == first.attachments


def test_a_revoked_member_gets_no_key(attachments: Attachments) -> None:
    sent = broadcast({"near": tuple(NAMES[:2])}, vector_a=Attachment(VECTOR, "near"))
    seal(attachments, sent)
    fewer = {name: key for name, key in MEMBERS.items() if name != NAMES[1]}
    offer, new = seal(attached(attachments.store, fewer), sent)
    assert new and len(offer.cohort_keys["near"]) == 1
    wrapped = offer.cohort_keys["near"]
    assert unwrap_cohort_key(wrapped, MEMBERS[NAMES[1]], "films", "near", bytes(32)) is None


def test_ids_follow_the_exact_arrays_whatever_the_codec_rounds(attachments: Attachments) -> None:
    short = attached(attachments.store, dict(MEMBERS), "int8")
    noisy = {"w": np.random.default_rng(1).standard_normal(50).astype(np.float32)}
    first, _ = seal(short, broadcast({}, public_a=Attachment(noisy)))
    again, new = seal(short, broadcast({}, public_a=Attachment(noisy)))
    assert not new and again.attachments == first.attachments
