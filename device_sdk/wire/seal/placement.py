"""Where a device is heard: its shard, a level of the topic that it sends to, and its cell.

A device has one of 4,096 shards for good. Which worker of an aggregator serves a shard, and at
which broker, may change: a *cell* is a broker under a name that the operator resolves by DNS.
A placement stands in the grant of an enrolment; a later one comes as a message in a session.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Key, Length, Such, Within
from device_sdk.wire.codec.message import Record

SHARDS = 4096
SHARD_LIMIT = 2**16 - 1
"""The highest number that a topic can hold; those given out are below ``SHARDS``."""
MOST_CELL_BYTES = 259
MOST_MIRROR_BYTES = 512
MOST_PACKET_BYTES = 2**28 - 1
_MOST_HOST_BYTES = 253
_MOST_PORT = 65_535
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_MIRROR = re.compile(rf"https?://[!-~]{{1,{MOST_MIRROR_BYTES - 8}}}")
_CELL = re.compile(rf"({_LABEL}(?:\.{_LABEL})*)(?::([1-9][0-9]{{0,4}}))?")


def shard_of(device_id: bytes) -> int:
    """The shard of a device: the low 12 bits of SHA-256(label || 00 || id)'s first two bytes, which
    are a little-endian number."""
    digest = hashlib.sha256(b"tessera/1 shard\x00" + device_id).digest()
    return int.from_bytes(digest[:2], "little") % SHARDS


def split_cell(cell: str) -> tuple[str, int | None]:
    """Host and port of a cell; None: the port that devices use already. Raises ValueError."""
    found = _CELL.fullmatch(cell)
    if found is not None:
        host, port = found.groups()
        if len(host) <= _MOST_HOST_BYTES and (port is None or int(port) <= _MOST_PORT):
            return host, None if port is None else int(port)
    raise ValueError(
        f"cell {cell!r:.300} is none; expected host or host:port, in lower-case letters, digits, "
        "'-' and '.'"
    )


def is_cell(cell: str) -> bool:
    """Whether :func:`split_cell` takes it."""
    try:
        split_cell(cell)
    except ValueError:
        return False
    return True


Shard = Annotated[int, Within(0, SHARD_LIMIT)]
Cell = Annotated[
    str,
    Length(1, MOST_CELL_BYTES),
    Such(is_cell, "host or host:port, in lower-case letters, digits, '-' and '.'"),
]
Mirror = Annotated[
    str, Length(1, MOST_MIRROR_BYTES), Such(_MIRROR.fullmatch, "a URL of http:// or https://")
]


@dataclass(frozen=True, slots=True)
class Placement(Record):
    """Where a device is heard."""

    shard: Shard
    cell: Cell = ""
    """The broker that the device is to be at; empty: the one that it enrolled at."""
    mirror: Mirror = ""
    """The URL under which a web server has the fleet's chunks; empty: none has. Not in grants."""
    packet_bytes: Annotated[int, Within(0, MOST_PACKET_BYTES), Key("packet")] = 0
    """The largest MQTT packet that the broker was found to take, whatever it says itself; 0: any.
    Not in grants, and not kept: it holds for the broker at hand."""

    MOST_BYTES = 1024


def own_placement(device_id: bytes) -> Placement:
    """Where a device belongs while there are no cells."""
    return Placement(shard_of(device_id))
