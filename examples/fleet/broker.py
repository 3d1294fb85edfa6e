"""A broker for the demo: Mosquitto as a child process where it is installed, else amqtt in here."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.fleet.child import Child
from examples.fleet.errors import FleetError

_START_SECONDS = 15.0
# Debian installs it where only root looks.
_MORE_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """Where the broker listens, and what it is."""

    name: str
    url: str
    alive: Callable[[], bool]


def mosquitto_path() -> str | None:
    """Mosquitto's executable; None where it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_MORE_FOLDERS])
    return shutil.which("mosquitto", path=path)


@contextmanager
def running_broker(folder: Path, executable: str | None) -> Iterator[RunningBroker]:
    """A broker on a free loopback port, which keeps nothing on disk and ends with the block.

    Args:
        folder: for Mosquitto's configuration and log.
        executable: Mosquitto's; None starts amqtt in a thread of this process.

    Raises FleetError where it does not come up.
    """
    port = _free_port()
    if executable is None:
        with _amqtt(port) as alive:
            yield RunningBroker(
                "amqtt, in the demo's own process", f"mqtt://127.0.0.1:{port}", alive
            )
        return
    settings = folder / "mosquitto.conf"
    settings.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
        "max_queued_messages 10000\nmax_inflight_messages 1000\n"
        # Started by root it would become another user, who may not read this folder.
        + ("user root\n" if hasattr(os, "geteuid") and os.geteuid() == 0 else "")
    )
    child = Child.start("mosquitto", [executable, "-c", str(settings)], folder, leash=True)
    try:
        _wait_for_port(port, lambda: child.running)
        yield RunningBroker(
            "Mosquitto, as a child process", f"mqtt://127.0.0.1:{port}", lambda: child.running
        )
    except OSError:
        raise FleetError(f"Mosquitto did not start:\n{child.log_tail()}") from None
    finally:
        child.stop()


@contextmanager
def _amqtt(port: int) -> Iterator[Callable[[], bool]]:
    try:
        from amqtt.broker import Broker
    except ImportError:
        raise FleetError(
            "no broker: install Mosquitto, or amqtt (pip install 'tessera-edge[demo]')"
        ) from None
    logging.getLogger("amqtt").setLevel(logging.ERROR)
    logging.getLogger("transitions").setLevel(logging.ERROR)
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    failure: list[BaseException] = []

    async def serve() -> None:
        broker = Broker(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
                "plugins": {
                    "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}
                },
            }
        )
        await broker.start()
        await stopping.wait()
        await broker.shutdown()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="amqtt", daemon=True)
    thread.start()
    try:
        try:
            _wait_for_port(port, thread.is_alive)
        except OSError:
            raise FleetError(f"amqtt did not start: {failure or 'no reason given'}") from None
        yield thread.is_alive
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(5.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, alive: Callable[[], bool]) -> None:
    """Raises OSError when nothing listens in time."""
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            if time.monotonic() > until or not alive():
                raise
            time.sleep(0.02)
