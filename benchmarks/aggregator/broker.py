"""A Mosquitto for a benchmark, as a child process on a free loopback port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
ACL = Path(__file__).parents[2] / "aggregator" / "acl.template"
SETTINGS: Mapping[str, Sequence[str]] = {
    "recommended": ("max_queued_messages 10000", "max_inflight_messages 1000"),
    "defaults": (),
}
"""What docs/operating/broker/mosquitto.md asks for, and what Mosquitto does without being asked."""
ACCOUNTS = {"tessera-aggregator": "server", "edge": "devices"}
"""Passwords by user."""
ACCOUNTS_FOR = {"aggregator": "tessera-aggregator", "devices": "edge"}


@dataclass(frozen=True)
class Broker:
    """``guarded``: whether it asks for passwords and keeps to the access rules that ship."""

    port: int
    pid: int
    guarded: bool

    def account(self, of: str) -> tuple[str, str] | None:
        """User and password of the ``aggregator`` or the ``devices``; None where none is asked."""
        user = ACCOUNTS_FOR[of]
        return (user, ACCOUNTS[user]) if self.guarded else None

    def url(self, port: int | None = None) -> str:
        """The aggregator's, by way of another ``port`` if one is given."""
        account = self.account("aggregator")
        login = "" if account is None else f"{account[0]}:{account[1]}@"
        return f"mqtt://{login}127.0.0.1:{port or self.port}"


@contextmanager
def running_mosquitto(
    folder: Path, settings: str = "recommended", *, guarded: bool = False
) -> Iterator[Broker]:
    """``settings``: a name in ``SETTINGS``. ``guarded``: with passwords and the access rules that
    ship; who has no account is let in, as whoever wants to enrol may be.

    Raises RuntimeError when Mosquitto is not installed or does not start.
    """
    if MOSQUITTO is None:
        raise RuntimeError("mosquitto is not installed (apt-get install mosquitto)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        "persistence false",
        "user root",
        "log_type error",
        "set_tcp_nodelay true",
        *SETTINGS[settings],
    ]
    if guarded:
        lines += [f"password_file {_passwords(folder)}", f"acl_file {ACL}"]
    config = folder / "mosquitto.conf"
    config.write_text("\n".join([*lines, ""]))
    process = subprocess.Popen([MOSQUITTO, "-c", str(config)])
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise RuntimeError("mosquitto did not start") from None
                time.sleep(0.02)
        yield Broker(port, process.pid, guarded)
    finally:
        process.terminate()
        process.wait(10)


def _passwords(folder: Path) -> Path:
    path = folder / "passwords"
    path.touch(mode=0o600)
    for user, password in ACCOUNTS.items():
        command = ["mosquitto_passwd", "-b", str(path), user, password]
        subprocess.run(command, check=True, capture_output=True)
    return path
