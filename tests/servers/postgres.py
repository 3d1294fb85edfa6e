"""A PostgreSQL of one's own on a free loopback port, from the distribution's package."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.brokers.mosquitto import free_port
from tests.fakes.waiting import PATIENCE_SECONDS

USER = "tessera"


def _programs() -> Path | None:
    """Where the server's programs lie: Debian keeps them, by version, outside of the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


PROGRAMS = _programs()
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
"""What gives a process another calendar (apt-get install faketime); None: it is not installed."""
MISSING = "PostgreSQL is not installed (apt-get install postgresql)"


class PostgresServer:
    """Its files lie in ``folder``, which must be short of path and open to all; the port stays the
    same across restarts. ``own_calendar``: one that can be set, where libfaketime is installed.

    It runs with ``fsync`` on and the settings that a server has without any but these ``lines``. As
    root we start it as the user whom the package made for it: it refuses to run as root.
    """

    def __init__(
        self, folder: Path, lines: tuple[str, ...] = (), *, own_calendar: bool = False
    ) -> None:
        assert PROGRAMS is not None, MISSING
        self._programs = PROGRAMS
        self.port = free_port()
        self._data = folder / "data"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._calendar = folder / "calendar" if own_calendar and FAKETIME is not None else None
        self.set_calendar(0.0)
        self._owner = "postgres" if os.geteuid() == 0 else None
        if self._owner is not None:
            user = pwd.getpwnam(self._owner)
            os.chown(folder, user.pw_uid, user.pw_gid)
        subprocess.run(
            [
                *(self._programs / "initdb", "-D", self._data, "-U", USER, "-A", "trust"),
                *("--no-locale", "-E", "UTF8", "--no-sync", "--no-instructions"),
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            user=self._owner,
            group=self._owner,
            extra_groups=None if self._owner is None else (),
        )
        settings = (
            f"port = {self.port}",
            "listen_addresses = '127.0.0.1'",
            "unix_socket_directories = ''",
            "max_connections = 50",
            *lines,
        )
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\n".join(settings) + "\n")
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write("host all all samenet trust\n")  # where a test has it listen further

    def copy(self, folder: Path) -> PostgresServer:
        """Another server with what this one holds now, as a standby has it or a backup; not
        started. This one must be stopped."""
        made = object.__new__(PostgresServer)
        made.__dict__.update(self.__dict__, port=free_port(), _process=None)
        made._data, made._log = folder / "data", folder / "server.log"
        shutil.copytree(self._data, made._data)
        if self._owner is not None:
            for path in (folder, made._data, *made._data.rglob("*")):
                shutil.chown(path, self._owner, self._owner)
        with (made._data / "postgresql.conf").open("a") as file:
            file.write(f"port = {made.port}\n")
        return made

    @property
    def has_calendar(self) -> bool:
        """Whether it has one of its own."""
        return self._calendar is not None

    def set_calendar(self, ahead_seconds: float) -> None:
        """Its calendar from the next second on, where it has one of its own."""
        if self._calendar is not None:
            new = self._calendar.with_suffix(".new")
            new.write_text(f"{ahead_seconds:+.3f}\n")
            new.chmod(0o644)
            new.replace(self._calendar)

    def _environment(self) -> dict[str, str] | None:
        if self._calendar is None:
            return None
        return os.environ | {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._calendar),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def url(self, database: str = "postgres") -> str:
        """The URL of one of its databases."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def run(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement with all rights; its rows."""
        import psycopg  # not for every session of tests

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of the process that starts the others."""
        assert self._process is not None
        return self._process.pid

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """All of its processes stand still, as on a machine that does; their sockets live on."""
        server = psutil.Process(self.pid)
        processes = [server, *server.children()]
        for each in processes:
            each.suspend()
        try:
            yield
        finally:
            for each in processes:
                each.resume()

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data],
                stdout=log,
                stderr=log,
                cwd=self._data.parent,
                env=self._environment(),
                user=self._owner,
                group=self._owner,
                extra_groups=None if self._owner is None else (),
            )
        until = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {self.log}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it in order; sessions are cut."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """End it as a crash does: the next start recovers from the log."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """kill -9 of the process that starts the others, which end once they notice."""
        others = psutil.Process(self.pid).children(recursive=True)
        self._end(signal.SIGKILL)
        # Until they are gone no other server starts.
        psutil.wait_procs(others, PATIENCE_SECONDS)

    def _answers(self) -> bool:
        ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None


@contextmanager
def running_postgres(*lines: str, own_calendar: bool = False) -> Iterator[PostgresServer]:
    """A server, until the block ends; nothing is left of it."""
    # Not below pytest's folder, which the server's own user may not enter.
    folder = Path(tempfile.mkdtemp(prefix="tessera-postgres-"))
    try:
        server = PostgresServer(folder, lines, own_calendar=own_calendar)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
