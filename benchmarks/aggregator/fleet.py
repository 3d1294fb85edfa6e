"""Devices for a benchmark: credentials in the registry, sessions in the table, updates ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.rows import DeviceRow
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.topics import Topics, UpTopic
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.handshake import DeviceCredential
from device_sdk.wire.seal.placement import shard_of

ITEMS, WIDTH = 3706, 64
ROWS, COLUMNS = 100, 16


@dataclass(frozen=True)
class Shape:
    """A task's matrix of ``items`` x ``width``, of which an update has ``rows`` x ``columns``."""

    items: int
    width: int
    rows: int
    columns: int


ML1M = Shape(ITEMS, WIDTH, ROWS, COLUMNS)


@dataclass(frozen=True)
class BenchDevice:
    """What a device's end needs."""

    credential: DeviceCredential
    handle: bytes

    @property
    def up_topic(self) -> str:
        """Of its shard, where it publishes."""
        return Topics().write(UpTopic(shard_of(self.credential.device_id), self.handle))


def make_bench_home(
    folder: Path, url: str, round_lines: str, shape: Shape = ML1M
) -> AggregatorHome:
    """A home whose task has a matrix of this shape."""
    home = AggregatorHome(folder)
    rng = np.random.default_rng(1)
    initialise(home, int(time.time()), rng.bytes)
    (folder / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(shape.items)))
    home.task_file.write_text(
        f'[task]\ncatalogue = "items.tsv"\n[broker]\nurl = "{url}"\n'
        f'[round]\n{round_lines}\n[scatter]\nloss = "bpr"\ncolumns = {shape.width}\n'
    )
    return home


def enrol_directly(
    store: Store, count: int, rng: np.random.Generator, first_round: int = 1
) -> list[BenchDevice]:
    """Rows as enrolment would write them; identities are shared by a few to save time."""
    identities = [Ed25519PrivateKey.from_private_bytes(rng.bytes(32)) for _ in range(64)]
    public = [identity.public_key().public_bytes_raw() for identity in identities]
    devices = []
    with store.database.transaction():
        for index in range(count):
            device_id = rng.bytes(16)
            row = DeviceRow(
                device_id,
                public[index % 64],
                rng.bytes(16),
                rng.bytes(32),
                shard_of(device_id),
                rng.bytes(8),
                int(time.time()),
                first_round,
            )
            store.devices.add(row)
            credential = DeviceCredential(row.device_id, identities[index % 64], row.admission_key)
            devices.append(BenchDevice(credential, row.handle))
    return devices


def shown_incarnation(parts: Parts) -> bytes:
    """What devices open sessions for."""
    _, message = parts.announcements.presence()
    return read_announcement(Presence, message, parts.keys.current().descriptor).incarnation


def scatter_body(rng: np.random.Generator, shape: Shape = ML1M) -> bytes:
    """An update of BPR in int8: the larger ones of the two losses."""
    columns = np.sort(rng.choice(shape.width, shape.columns, replace=False)).astype(np.int64)
    rows = np.sort(rng.choice(shape.items, shape.rows, replace=False)).astype(np.int64)
    values = rng.standard_normal((shape.rows, shape.columns), dtype=np.float32)
    update = Update(1, {"columns": columns, "rows": rows, "values": values})
    return encode_scatter_update(update, shape.width, "int8", rng)
