"""Where a device is heard: its shard, a level of the topic that it sends to, and its cell.

A device has one of 4,096 shards for good. Which worker of an aggregator serves a shard, and at
which broker, may change: a *cell* is a broker under a name that the operator resolves by DNS.
A placement stands in the grant of an enrolment; a later one comes as a record in a session, as
canonical CBOR of {cell, mirror, packet, shard}, of which all but the last may be missing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record

SHARDS = 4096
SHARD_LIMIT = 2**16 - 1
"""The highest number that a topic can hold; those given out are below ``SHARDS``."""
MOST_CELL_BYTES = 259
MOST_MIRROR_BYTES = 512
MOST_PACKET_BYTES = 2**28 - 1
_MOST_HOST_BYTES = 253
_MOST_PORT = 65_535
_MOST_BYTES = 1024
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_MIRROR = re.compile(rf"https?://[!-~]{{1,{MOST_MIRROR_BYTES - 8}}}")
_CELL = re.compile(rf"({_LABEL}(?:\.{_LABEL})*)(?::([1-9][0-9]{{0,4}}))?")


def shard_of(device_id: bytes) -> int:
    """The shard of a device: the low 12 bits of SHA-256(label || 00 || id)'s first two bytes, which
    are a little-endian number."""
    digest = hashlib.sha256(b"tessera/1 shard\x00" + device_id).digest()
    return int.from_bytes(digest[:2], "little") % SHARDS


@dataclass(frozen=True, slots=True)
class Placement:
    """Raises ValueError, naming what is wrong."""

    shard: int
    cell: str = ""
    """``host`` or ``host:port``, lower-case letters, digits, '-' and '.'; empty: the broker that
    the device enrolled at."""
    mirror: str = ""
    """The URL under which a web server has the fleet's chunks; empty: none has. Not in grants."""
    packet_bytes: int = 0
    """The largest MQTT packet that the broker was found to take, whatever it says itself; 0: any.
    Not in grants, and not kept: it is the broker's of now."""

    def __post_init__(self) -> None:
        if not 0 <= self.shard <= SHARD_LIMIT:
            raise ValueError(f"shard {self.shard} is not between 0 and {SHARD_LIMIT}")
        if self.cell:
            split_cell(self.cell)
        if self.mirror and not _MIRROR.fullmatch(self.mirror):
            raise ValueError(f"mirror {self.mirror!r:.300} is no URL of http:// or https://")
        if not 0 <= self.packet_bytes <= MOST_PACKET_BYTES:
            raise ValueError(f"packet_bytes is {self.packet_bytes}; expected up to 2^28 - 1")

    def fields(self) -> dict[str, cbor.CborValue]:
        """As they stand in a record: all but the shard where there are such."""
        said: dict[str, cbor.CborValue] = {
            "cell": self.cell,
            "mirror": self.mirror,
            "packet": self.packet_bytes,
        }
        return {"shard": self.shard} | {name: value for name, value in said.items() if value}


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


def own_placement(device_id: bytes) -> Placement:
    """Where a device belongs while there are no cells."""
    return Placement(shard_of(device_id))


def write_placement(placement: Placement) -> bytes:
    """Canonical CBOR."""
    return cbor.encode(placement.fields())


def read_placement(payload: bytes) -> Placement:
    """Parse a placement. Raises ``WireError``."""
    optional = ("cell", "mirror", "packet")
    record = Record(cbor.decode(payload, limit_bytes=_MOST_BYTES), ("shard",), optional)
    placement = placement_in(record)
    if "packet" in record:
        most = record.unsigned("packet", MOST_PACKET_BYTES)
        if not most:
            raise WireError("bad-field", "packets of no bytes")
        placement = replace(placement, packet_bytes=most)
    if "mirror" not in record:
        return placement
    mirror = record.text("mirror", MOST_MIRROR_BYTES)
    if not _MIRROR.fullmatch(mirror):
        raise WireError("bad-field", "a mirror that is none")
    return replace(placement, mirror=mirror)


def placement_in(record: Record) -> Placement:
    """The placement among the fields of a record. Raises ``WireError("bad-field")``."""
    shard = record.unsigned("shard", SHARD_LIMIT)
    if "cell" not in record:
        return Placement(shard)
    cell = record.text("cell", MOST_CELL_BYTES)
    try:
        split_cell(cell)
    except ValueError:
        raise WireError("bad-field", "a cell that is none") from None
    return Placement(shard, cell)
