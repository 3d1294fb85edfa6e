"""A broker for the demo, as a child process: Mosquitto where it is installed, else amqtt.

    python -m aggregator.demo.broker PORT

is amqtt on a loopback port.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aggregator.demo.child import Child, FleetError

_START_SECONDS = 15.0
# Debian installs it where only root looks.
_MORE_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """Where the broker listens, and what it is."""

    name: str
    url: str
    alive: Callable[[], bool]

    @property
    def is_amqtt(self) -> bool:
        return self.name.startswith("amqtt")


def mosquitto_path() -> str | None:
    """Mosquitto's executable; None where it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_MORE_FOLDERS])
    return shutil.which("mosquitto", path=path)


@contextmanager
def running_broker(folder: Path, executable: str | None) -> Iterator[RunningBroker]:
    """A broker on a free loopback port, which keeps nothing on disk and ends with the block.

    Whatever it prints goes to a log in ``folder``.

    Args:
        folder: for its log, and Mosquitto's configuration.
        executable: Mosquitto's; None starts amqtt.

    Raises FleetError where it does not come up.
    """
    port = _free_port()
    if executable is None:
        name = "amqtt"
        if importlib.util.find_spec("amqtt") is None:
            raise FleetError(
                "no broker: install Mosquitto, or amqtt (pip install 'tessera-edge[demo]')"
            )
        command = [sys.executable, "-m", "aggregator.demo.broker", str(port)]
    else:
        name = "Mosquitto"
        settings = folder / "mosquitto.conf"
        settings.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
            "max_queued_messages 10000\nmax_inflight_messages 1000\n"
            # Started by root it would become another user, who may not read this folder.
            + ("user root\n" if hasattr(os, "geteuid") and os.geteuid() == 0 else "")
        )
        command = [executable, "-c", str(settings)]
    child = Child.start(name.lower(), command, folder, leash=True)
    try:
        _wait_for_port(port, lambda: child.running)
        yield RunningBroker(
            f"{name}, as a child process", f"mqtt://127.0.0.1:{port}", lambda: child.running
        )
    except OSError:
        raise FleetError(f"{name} did not start:\n{child.log_tail()}") from None
    finally:
        child.stop()


async def _serve_amqtt(port: int) -> None:
    """Serve until this process is ended."""
    from amqtt.broker import Broker

    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    listener = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
    await Broker({"listeners": {"default": listener}, "plugins": plugins}).start()
    await asyncio.Event().wait()


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


if __name__ == "__main__":
    # amqtt warns of every client that leaves, with a traceback.
    logging.basicConfig(level=logging.CRITICAL)
    asyncio.run(_serve_amqtt(int(sys.argv[1])))
