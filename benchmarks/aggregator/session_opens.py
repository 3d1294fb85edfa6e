"""Function level: session opens a second on one core."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from aggregator.assembly import World, assemble
from aggregator.task import read_task
from aggregator.uplink import Answer
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home
from device_sdk.wire.device_session import SessionOpening
from device_sdk.wire.link_events import Message
from device_sdk.wire.topics import Topics, UpTopic

__all__ = ["measure_opens"]


def measure_opens(count: int, folder: Path) -> float:
    """Opens a second: registry, admission, HPKE both ways, signatures, session table."""
    rng = np.random.default_rng(3)
    home = make_bench_home(folder, "mqtt://127.0.0.1:1", "deadline_seconds = 86400.0")
    store = home.open_store()
    devices = enrol_directly(store, count, rng)
    world = World(time.monotonic, time.time, rng)
    parts = assemble(home, store, read_task(home.task_file), world)
    descriptor, topics = parts.keys.current().descriptor, Topics()
    messages = [
        Message(
            topics.write(UpTopic(0, device.handle)),
            SessionOpening(device.credential, descriptor, time.monotonic).message,
            False,
        )
        for device in devices
    ]
    began = time.perf_counter()
    replies = [parts.uplink.receive(message) for message in messages]
    seconds = time.perf_counter() - began
    assert all(isinstance(reply, Answer) for reply in replies)
    store.database.close()
    return count / seconds
