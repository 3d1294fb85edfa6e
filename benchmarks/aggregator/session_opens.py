"""Function level: session opens a second on one core."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from aggregator.serve.assembly import World, assemble
from aggregator.serve.uplink import Answer
from aggregator.task.file import read_task
from benchmarks.aggregator.fleet import enrol_directly, make_bench_home, shown_incarnation
from device_sdk.link.events import Message
from device_sdk.wire.publish.topics import Topics, UpTopic
from device_sdk.wire.seal.device_session import SessionOpening
from device_sdk.wire.seal.freshness import Freshness


def measure_opens(count: int, folder: Path) -> float:
    """Opens a second: registry, admission, HPKE both ways, signatures, session table.

    They may take all of the time here, which a service would not let them.
    """
    rng = np.random.default_rng(3)
    lines = "deadline_seconds = 86400.0\n[admission]\nopens_share = 1.0"
    home = make_bench_home(folder, "mqtt://127.0.0.1:1", lines)
    store = home.open_store()
    devices = enrol_directly(store, count, rng)
    world = World(time.monotonic, time.time, rng)
    parts = assemble(home, store, read_task(home.task_file), world)
    descriptor, topics = parts.keys.current().descriptor, Topics()
    freshness = Freshness(shown_incarnation(parts), 1)
    messages = [
        Message(
            topics.write(UpTopic(0, device.handle)),
            SessionOpening(device.credential, descriptor, freshness, time.monotonic).message,
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
