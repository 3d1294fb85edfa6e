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
from aggregator.store.devices import DeviceRow
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.seal.device_session import DeviceCredential
from device_sdk.wire.seal.placement import shard_of
from device_sdk.wire.seal.presence import read_presence

ITEMS, WIDTH = 3706, 64
ROWS, COLUMNS = 100, 16


@dataclass(frozen=True)
class BenchDevice:
    """What a device's end needs."""

    credential: DeviceCredential
    handle: bytes


def make_bench_home(folder: Path, url: str, round_lines: str) -> AggregatorHome:
    """A home whose task has ML-1M's 3,706 items and K = 64."""
    home = AggregatorHome(folder)
    rng = np.random.default_rng(1)
    initialise(home, int(time.time()), rng.bytes)
    (folder / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(ITEMS)))
    home.task_file.write_text(
        f'[task]\ncatalogue = "items.tsv"\n[broker]\nurl = "{url}"\n'
        f"[round]\n{round_lines}\n[scatter]\ncolumns = {WIDTH}\n"
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
    return read_presence(message, parts.keys.current().descriptor).incarnation


def scatter_body(rng: np.random.Generator) -> bytes:
    """An update of 100 rows x 16 columns in int8."""
    columns = np.sort(rng.choice(WIDTH, COLUMNS, replace=False)).astype(np.int64)
    rows = np.sort(rng.choice(ITEMS, ROWS, replace=False)).astype(np.int64)
    values = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    update = Update(1, {"columns": columns, "rows": rows, "values": values})
    return encode_scatter_update(update, WIDTH, "int8", rng)
