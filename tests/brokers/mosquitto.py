"""A Mosquitto of one's own on a free loopback port, as a child process."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.waiting import PATIENCE_SECONDS

RECOMMENDED = ("max_queued_messages 10000", "max_inflight_messages 1000")
"""What docs/operating/broker/mosquitto.md asks for."""
EXECUTABLE = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


class Mosquitto:
    """Started by ``start``; the port stays the same across restarts.

    ``lines`` are added to the configuration file (``listener`` stands there already).
    """

    def __init__(
        self,
        folder: Path,
        lines: Sequence[str] = ("allow_anonymous true",),
        port: int = 0,
        *,
        persistence: bool = False,
    ) -> None:
        assert EXECUTABLE is not None
        self.port = port or free_port()
        self.configuration = folder / f"mosquitto-{self.port}.conf"
        # As root it would change to another user, who cannot read the test's folder.
        head = [f"listener {self.port} 127.0.0.1", "user root"]
        if not persistence:
            head.append("persistence false")
        self.configuration.write_text("\n".join([*head, *lines, ""]))
        self._log = folder / f"mosquitto-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert EXECUTABLE is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [EXECUTABLE, "-c", str(self.configuration)], stdout=log, stderr=log
            )
        try:
            wait_for_port(self.port)
        except OSError:
            self.stop()
            raise RuntimeError(f"Mosquitto did not start: {self._log.read_text()}") from None

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``: nothing is written, nobody is told."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None


def websocket_lines(port: int) -> tuple[str, ...]:
    """A second listener, for WebSockets: Mosquitto 2.0.11 starts with none but these, and ends."""
    return (
        "allow_anonymous true",
        f"listener {port} 127.0.0.1",
        "protocol websockets",
        "socket_domain ipv4",
    )


@contextmanager
def running(broker: Mosquitto) -> Iterator[Mosquitto]:
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


def password_file(path: Path, users: dict[str, str]) -> Path:
    """Hashed by Mosquitto's own tool."""
    path.touch(mode=0o600)
    for user, password in users.items():
        subprocess.run(
            ["mosquitto_passwd", "-b", str(path), user, password], check=True, capture_output=True
        )
    return path
