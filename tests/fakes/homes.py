"""Aggregators for tests: a home with a small task, served in this thread or as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from aggregator.cli import main
from aggregator.home import AggregatorHome, serve_lock
from aggregator.keys.enrolment import make_codes
from aggregator.keys.folder import USUAL_LIVES, Lives, initialise
from aggregator.methods.method import Binding
from aggregator.rounds.machine import RoundEvent
from aggregator.serve.assembly import LINK_SETTINGS, Whole, World, assemble
from aggregator.serve.service import Parts, Service
from aggregator.serve.standings import PlacementOf
from aggregator.store import Store
from aggregator.task.file import read_task
from device_sdk.link.settings import LinkSettings
from device_sdk.wire.seal.placement import own_placement
from tests.fakes.threads import on_thread
from tests.fakes.waiting import PATIENCE_SECONDS, endless, wait_until

ITEMS, WIDTH = 20, 8


def make_home(
    folder: Path,
    url: str,
    round_lines: str = "",
    more: str = "",
    *,
    lives: Lives = USUAL_LIVES,
    store_url: str | None = None,
) -> AggregatorHome:
    """A home with 20 items and K = 8, which stays; a store in a file, or at a URL."""
    home = AggregatorHome(folder / "home", store_url)
    initialise(home, int(time.time()), os.urandom, lives)
    lines = [f"item-{row}\tTitle {row}" for row in range(ITEMS)]
    (home.folder / "items.tsv").write_text("\n".join(lines) + "\n")
    home.task_file.write_text(
        '[task]\ncatalogue = "items.tsv"\n'
        f'[broker]\nurl = "{url}"\n'
        f"[round]\n{endless(round_lines)}\n"
        f"[scatter]\ncolumns = {WIDTH}\nleast_squares.most_columns = 0\n{more}\n"
    )
    return home


def invite(home: AggregatorHome, count: int = 1, expires_seconds: int = 3600) -> list[str]:
    """Codes, as ``tessera-aggregator invite`` makes them."""
    store = home.open_store()
    now = int(time.time())
    codes = make_codes(store, count, now, os.urandom)
    with store.database.transaction():
        for code in codes:
            store.tokens.add(code, now, now + expires_seconds, None)
    store.database.close()
    return [code.to_text() for code in codes]


def command(home: AggregatorHome, *arguments: str) -> int:
    """Run an operator's command."""
    return main([arguments[0], "--home", str(home.folder), *arguments[1:]])


@dataclass
class Serving:
    """A service on a thread of its own."""

    parts: Parts
    rounds: list[RoundEvent] = field(default_factory=list)
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.service = Service(self.parts, self.rounds.append)


@contextmanager
def serving(
    home: AggregatorHome,
    binding: Binding | None = None,
    link_settings: LinkSettings = LINK_SETTINGS,
    placement_of: PlacementOf = own_placement,
) -> Iterator[Serving]:
    """Serve a home in this process until the block ends; errors of the service come out here.

    ``binding`` takes the place of the task file's.
    """

    def serve(ready: Callable[[Serving], None], stopping: Callable[[], bool]) -> None:
        with serve_lock(home):
            task = read_task(home.task_file)
            if binding is not None:
                task = replace(task, binding=binding)
            world = World(time.monotonic, time.time, np.random.default_rng(3), link=link_settings)
            role = Whole(placement_of)
            served = Serving(assemble(home, home.open_store(), task, world, role))
            served.parts.link.start()
            ready(served)
            try:
                served.service.run(stopping, lambda: None)
            finally:
                served.service.stop()

    with on_thread(serve) as served:
        yield served


class ServeProcess:
    """``tessera-aggregator serve`` as a child process."""

    def __init__(self, home: AggregatorHome) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self.log = home.folder / "serve.log"

    def start(self, point: str = "", calls: int = 0) -> None:
        """Start; at the ``calls``-th passage of ``point`` (``tests.faults.crash_points``), if any,
        it kills itself."""
        home = str(self._home.folder)
        command = ["-m", "aggregator.cli", "serve", "--home", home]
        if point:
            command = ["-m", "tests.fakes.dying_serve", home, point, str(calls)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)

    def await_connections(self, count: int) -> None:
        """Wait until the processes started so far have connected ``count`` times to the broker."""
        wait_until(lambda: self.log.read_text().count("connected to") >= count, self.log.read_text)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def ended(self) -> int | None:
        """The exit code of a process that is gone, -9 for one killed; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_SECONDS)
        self._process = None
        return code


def open_store(home: AggregatorHome) -> Store:
    return home.open_store()
