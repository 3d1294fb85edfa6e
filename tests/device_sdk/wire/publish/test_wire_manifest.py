from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    EVERYONE,
    MAX_BODY_BYTES,
    MOST_CHUNKS,
    Mark,
    Order,
    RoundManifest,
    order,
    selected,
)
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES

MANIFEST = RoundManifest(
    root_fingerprint=bytes(16),
    task="films",
    cohort="all",
    generation=1_700_000_000,
    round=4,
    version=3,
    artifact_id=b"a" * 32,
    catalogue_id=b"c" * 32,
    broadcast_id=b"b" * 32,
    key_epoch=1,
    sampling_seed=b"s" * 32,
    threshold=2**63,
    opened_unix_seconds=1_700_000_000,
    deadline_unix_seconds=1_700_000_100,
    codec="fp16",
    length=CHUNK_BYTES + 1,
    chunks=(b"1" * 32, b"2" * 32),
)


def test_round_trip() -> None:
    empty = replace(MANIFEST, length=0, chunks=())
    assert decode(RoundManifest, encode(empty)) == empty


def test_the_largest_manifest_fits_a_message() -> None:
    largest = replace(
        MANIFEST,
        task="t" * 64,
        cohort="c" * 64,
        codec="x" * 64,
        length=CHUNK_BYTES * MOST_CHUNKS,
        chunks=(bytes(32),) * MOST_CHUNKS,
    )
    body = encode(largest)
    assert len(body) <= MAX_BODY_BYTES < MAX_MESSAGE_BYTES
    assert decode(RoundManifest, body) == largest


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": "Films"},
        {"task": "a/b"},
        {"cohort": ""},
        {"codec": "fp 16"},
        {"round": -1},
        {"version": 2**63},
        {"threshold": -1},
        {"artifact_id": b""},
        {"root_fingerprint": bytes(32)},
        {"deadline_unix_seconds": 1},
        {"length": CHUNK_BYTES * MOST_CHUNKS + 1},
        {"chunks": (b"1" * 32, b"2" * 31)},
    ],
)
def test_wrong_fields_are_refused_at_both_ends(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0].removesuffix("s")):
        replace(MANIFEST, **wrong)  # type: ignore[arg-type]
    plain = {field.name: getattr(MANIFEST, field.name) for field in fields(MANIFEST)} | wrong
    with pytest.raises(WireError):
        decode(RoundManifest, cbor.encode({**plain, "chunks": list(plain["chunks"])}))


def test_selection_is_a_fair_draw() -> None:
    rng = np.random.default_rng(3)
    ids = [rng.bytes(16) for _ in range(20_000)]
    share = np.mean([selected(b"s" * 32, 2**62, "films", 1, device) for device in ids])
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
    both = np.mean(
        [
            selected(b"s" * 32, 2**63, "films", 1, device)
            and selected(b"s" * 32, 2**63, "films", 2, device)
            for device in ids
        ]
    )
    assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 20_000) ** 0.5  # rounds are independent


def test_selection_at_the_ends() -> None:
    for number in range(100):
        device = bytes((number,)) * 16
        assert not selected(bytes(32), 0, "films", 1, device)
        assert selected(bytes(32), EVERYONE, "films", 1, device)
    with pytest.raises(ValueError, match="32 bytes"):
        selected(b"", 1, "films", 1, b"device")


def mark(generation: int, round_number: int, version: int) -> tuple[RoundManifest, bytes]:
    manifest = replace(MANIFEST, generation=generation, round=round_number, version=version)
    return manifest, encode(manifest)


SMALL = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(SMALL, max_size=12))
def test_order_holds_whatever_arrives(arrivals: list[tuple[int, int, int]]) -> None:
    current: Mark | None = None
    accepted: list[tuple[int, int, int]] = []
    for arrival in arrivals:
        try:
            verdict, current = order(current, *mark(*arrival))
        except WireError as error:
            assert error.reason in ("stale-manifest", "version-fell")
            continue
        if verdict is Order.NEWER:
            accepted.append(arrival)
        else:
            assert arrival == accepted[-1]
    rounds = [entry[:2] for entry in accepted]
    assert rounds == sorted(set(rounds))
    for before, after in itertools.pairwise(accepted):
        assert after[0] > before[0] or after[2] >= before[2]


def test_order_rules_one_by_one() -> None:
    verdict, current = order(None, *mark(5, 4, 3))
    assert verdict is Order.NEWER
    assert order(current, *mark(5, 4, 3))[0] is Order.SAME
    assert order(current, *mark(5, 5, 3))[0] is Order.NEWER  # without quorum: the same version
    assert order(current, *mark(6, 0, 0))[0] is Order.NEWER  # restored from a backup
    for arrival, reason in (
        ((5, 4, 4), "stale-manifest"),  # another manifest for the same round
        ((5, 3, 3), "stale-manifest"),
        ((4, 9, 9), "stale-manifest"),
        ((5, 5, 2), "version-fell"),
    ):
        with pytest.raises(WireError) as caught:
            order(current, *mark(*arrival))
        assert caught.value.reason == reason
