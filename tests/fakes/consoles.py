"""Consoles for tests: in this process without a socket, or as the command runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from argon2 import PasswordHasher
from httpx import ASGITransport, AsyncClient, Response

from aggregator.console.app import console_app
from aggregator.console.gate import own_hosts
from aggregator.console.reader import FleetReader
from aggregator.console.users import ConsoleUser, ConsoleUsers, PasswordCheck, Role
from aggregator.console.web import Console
from aggregator.home import AggregatorHome
from aggregator.task.file import ConsoleSettings
from tests.brokers.mosquitto import free_port, wait_for_port
from tests.fakes.child_environment import child_environment
from tests.fakes.waiting import PATIENCE_SECONDS

PASSWORD = "correct horse battery"
ORIGIN = "http://127.0.0.1:8443"
SETTINGS = ConsoleSettings("127.0.0.1:8443")
_QUICK = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
"""A hash that takes no time: what one costs is the library's promise, not ours."""
_HASH = _QUICK.hash(PASSWORD)


def add_users(home: AggregatorHome) -> None:
    """``anna``, who operates, and ``vic``, who looks."""
    users = ConsoleUsers(home.console_file)
    for name, role in (("anna", Role.OPERATOR), ("vic", Role.VIEWER)):
        users.add(ConsoleUser(name, role, _HASH))


class CountedCheck(PasswordCheck):
    """Counts how often a password's hash was computed, for which name."""

    def __init__(self) -> None:
        super().__init__(_QUICK)
        self.asked: list[str | None] = []
        self.verified: list[str] = []
        hasher = self._hasher

        class Counting(PasswordHasher):
            def verify(counting, hash: str | bytes, password: str | bytes) -> bool:
                self.verified.append(str(hash))
                return hasher.verify(hash, password)  # type: ignore[return-value]

        self._hasher = Counting()

    def __call__(self, user: ConsoleUser | None, password: str) -> bool:
        self.asked.append(None if user is None else user.name)
        return super().__call__(user, password)


@dataclass
class Browser:
    """Somebody at a console, with cookies of his own."""

    client: AsyncClient
    portal: BlockingPortal

    def get(self, path: str, **headers: str) -> Response:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, token: str | None = None, **fields: str) -> Response:
        """As a page of the console does, with its token; or with another one."""
        given = {"form_token": self.token() if token is None else token, **fields}
        return self.send("POST", path, data=given, headers={"Origin": ORIGIN})

    def send(self, method: str, path: str, **more: Any) -> Response:
        """Anything."""
        return self.portal.call(partial(self.client.request, method, path, **more))

    def log_in(self, name: str, password: str = PASSWORD, to: str = "/now") -> Response:
        given = {"name": name, "password": password, "to": to}
        return self.send("POST", "/login", data=given, headers={"Origin": ORIGIN})

    def token(self) -> str:
        """What stands in the forms of his pages."""
        found = re.search(r'name="form_token" value="([0-9a-f]+)"', self.get("/now").text)
        return "" if found is None else found[1]


@dataclass
class InProcess:
    """A console without a socket. ``now_seconds``: what its clock says."""

    home: AggregatorHome
    settings: ConsoleSettings = SETTINGS
    now_seconds: float = 1000.0
    passwords: CountedCheck = field(default_factory=CountedCheck)

    def __post_init__(self) -> None:
        self.console = Console(
            self.home.folder,
            self.settings,
            lambda: self.now_seconds,
            time.time,
            os.urandom,
            ConsoleUsers(self.home.console_file),
            FleetReader(self.home.folder),
            self.passwords,
        )
        self.app = console_app(self.console, own_hosts(self.settings))
        self._running = start_blocking_portal()
        self.portal = self._running.__enter__()

    def browser(self, peer: str = "127.0.0.1") -> Browser:
        """Somebody new, who comes from there."""
        transport = ASGITransport(self.app, raise_app_exceptions=False, client=(peer, 40_000))
        return Browser(AsyncClient(transport=transport, base_url=ORIGIN), self.portal)

    def logged_in(self, name: str) -> Browser:
        found = self.browser()
        assert found.log_in(name).status_code == 303
        return found

    def close(self) -> None:
        self._running.__exit__(None, None, None)
        self.console.reader.close()


@dataclass
class ConsoleProcess:
    """``tessera-aggregator console``. ``log``: what it says."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path


@contextmanager
def running_console(home: AggregatorHome, port: int = 0) -> Iterator[ConsoleProcess]:
    """The command, at a port of this machine; 0: a free one."""
    port, log = port or free_port(), home.folder / "console.log"
    own = ["console", "--home", str(home.folder), "--address", f"127.0.0.1:{port}"]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "aggregator.cli", *own],
            stdout=out,
            stderr=out,
            env=child_environment(),
        )
    try:
        wait_for_port(port)
        yield ConsoleProcess(process, port, log)
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
