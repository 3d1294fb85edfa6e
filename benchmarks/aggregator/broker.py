"""A Mosquitto for a benchmark, as a child process on a free loopback port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MOSQUITTO", "running_mosquitto"]

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@contextmanager
def running_mosquitto(folder: Path) -> Iterator[int]:
    """Yields the port. Raises RuntimeError when Mosquitto is not installed or does not start."""
    if MOSQUITTO is None:
        raise RuntimeError("mosquitto is not installed (apt-get install mosquitto)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nuser root\n"
        "log_type error\nset_tcp_nodelay true\n"
    )
    process = subprocess.Popen([MOSQUITTO, "-c", str(config)])
    try:
        until = time.monotonic() + 5
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise RuntimeError("mosquitto did not start") from None
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)
