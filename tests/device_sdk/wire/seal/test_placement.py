"""Shards and cells: what is written is read, and nothing else."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, decode_value, encode
from device_sdk.wire.seal.enrolment_message import EnrolAnswer, Grant
from device_sdk.wire.seal.placement import (
    MOST_CELL_BYTES,
    SHARDS,
    Placement,
    own_placement,
    shard_of,
    split_cell,
)

LABEL = r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?"
HOSTS = st.from_regex(rf"{LABEL}(\.{LABEL}){{0,3}}", fullmatch=True)
PORTS = st.none() | st.integers(1, 65_535)
CELLS = st.builds(lambda host, port: host if port is None else f"{host}:{port}", HOSTS, PORTS)
MIRRORS = st.from_regex(r"https?://[!-~]{1,40}", fullmatch=True)
PLACEMENTS = st.builds(
    Placement, st.integers(0, 65_535), st.just("") | CELLS, st.just("") | MIRRORS
)
BAD_CELLS = [
    *("", " ", "a b", "a/b", "user@host", "mqtt://host", "host:", "host:0", "host:65536", ":1883"),
    *(
        "host:01",
        "host:1883:1",
        "[::1]:1883",
        "::1",
        "Host",
        "h\u00f6st",
        "host.",
        ".host",
        "-host",
    ),
    *("host-", "a..b", "host\n", "host\x00", "x" * 64, ".".join(["x" * 63] * 4), "h" * 300),
]


@given(HOSTS, PORTS)
def test_a_cell_is_a_host_with_or_without_a_port(host: str, port: int | None) -> None:
    assert split_cell(host if port is None else f"{host}:{port}") == (host, port)


def test_the_longest_cell_fits() -> None:
    host = ".".join(["x" * 63] * 3 + ["x" * 61])
    placement = Placement(1, f"{host}:65535")
    assert len(host) == 253 and len(placement.cell) == MOST_CELL_BYTES
    assert decode(Placement, encode(placement)) == placement


@pytest.mark.parametrize("cell", BAD_CELLS, ids=repr)
def test_what_is_no_cell_is_neither_said_nor_heard(cell: str) -> None:
    with pytest.raises(WireError, match="bad-field"):
        decode(Placement, cbor.encode({"cell": cell, "shard": 1}))
    with pytest.raises(ValueError, match="expected host or host:port"):
        split_cell(cell)
    if cell:
        with pytest.raises(ValueError, match="expected host or host:port"):
            Placement(1, cell)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"shard": -1},
        {"shard": 65_536},
        {"shard": 1.0},
        {"shard": True},
        {"shard": 1, "cell": 3},
        {"shard": 1, "cell": b"host"},
        {"shard": 1, "cells": "host"},
        {"cell": "host"},
        [],
    ],
    ids=str,
)
def test_what_is_no_placement_is_refused(value: cbor.CborValue) -> None:
    with pytest.raises(WireError):
        decode(Placement, cbor.encode(value))


@given(st.binary(min_size=16, max_size=16))
def test_a_shard_is_twelve_bits_of_a_hash(device_id: bytes) -> None:
    digest = hashlib.sha256(b"tessera/1 shard" + b"\x00" + device_id).digest()
    assert shard_of(device_id) == digest[0] + 256 * (digest[1] % 16) < SHARDS
    assert own_placement(device_id) == Placement(shard_of(device_id))


def test_shards_are_as_full_as_each_other() -> None:
    rng = np.random.default_rng(1)
    counts = Counter(shard_of(rng.bytes(16)) for _ in range(200_000))
    # Poisson with a mean of 49: none is empty, and none has twice as many.
    assert len(counts) == SHARDS and max(counts.values()) < 98


@given(PLACEMENTS)
def test_a_grant_holds_a_placement(placement: Placement) -> None:
    grant = Grant(b"d" * 16, b"h" * 16, b"k" * 32, placement.shard, placement.cell)
    body = encode(EnrolAnswer(grant, 5))
    assert decode(EnrolAnswer, body).verdict == grant
    assert grant.placement == replace(placement, mirror="")


@pytest.mark.parametrize("cell", BAD_CELLS, ids=repr)
def test_a_grant_with_a_bad_cell_is_refused(cell: str) -> None:
    fields: dict[str, cbor.CborValue] = {"admission": b"k" * 32, "device": b"d" * 16}
    fields |= {"handle": b"h" * 16, "shard": 0, "cell": cell}
    with pytest.raises(WireError, match="bad-field"):
        decode_value(EnrolAnswer, {"verdict": fields, "time": 5})


BAD_MIRRORS = ["", "ftp://a", "https://", "https://a b", "http://\u00f6", "https://" + "x" * 505]


@pytest.mark.parametrize("mirror", BAD_MIRRORS, ids=repr)
def test_what_is_no_url_is_no_mirror(mirror: str) -> None:
    with pytest.raises(WireError, match="bad-field"):
        decode(Placement, cbor.encode({"mirror": mirror, "shard": 1}))
    if mirror:
        with pytest.raises(ValueError, match="expected a URL"):
            Placement(1, mirror=mirror)
