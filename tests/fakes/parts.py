"""A home's parts in this thread, without a broker, and devices as enrolment would leave them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from aggregator.home import AggregatorHome
from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Parts
from aggregator.store import Store
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task


def device_row(device_id: bytes, first_round: int = 1, enrolled_seconds: int = 0) -> DeviceRow:
    """Keys and handle follow from the id: nobody has the secrets that belong to them."""
    keys = device_id * 2
    return DeviceRow(
        device_id, keys, device_id, keys, 0, device_id[:8], enrolled_seconds, first_round
    )


def enrol(home: AggregatorHome, device_ids: Iterable[bytes], first_round: int = 1) -> None:
    """Write devices into the registry of a home; ``first_round``: what they may take part in."""
    store = home.open_store()
    with store.database.transaction():
        for device_id in device_ids:
            store.devices.add(device_row(device_id, first_round))
    store.database.close()


def parts_of(
    home: AggregatorHome,
    clock: Callable[[], float] = time.monotonic,
    unix_clock: Callable[[], float] = time.time,
    store: Store | None = None,
) -> Parts:
    """What ``serve`` would run, assembled and not started."""
    world = World(clock, unix_clock, np.random.default_rng(1))
    return assemble(home, store or home.open_store(), read_task(home.task_file), world)
