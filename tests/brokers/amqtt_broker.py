"""amqtt, a broker that speaks MQTT 3.1.1 only, in a child process on a free loopback port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.brokers.mosquitto import free_port, wait_for_port

AMQTT_PROGRAM = """
import asyncio, sys
from amqtt.broker import Broker

async def main(port, kind):
    broker = Broker({
        "listeners": {"default": {"type": kind, "bind": f"127.0.0.1:{port}"}},
        "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    })
    await broker.start()
    await asyncio.Event().wait()

asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


@contextmanager
def running_amqtt(kind: str = "tcp") -> Iterator[str]:
    """Yields the broker's URL. ``kind``: ``tcp`` or ``ws``."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", AMQTT_PROGRAM, str(port), kind],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port)
        yield f"{'ws' if kind == 'ws' else 'mqtt'}://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
