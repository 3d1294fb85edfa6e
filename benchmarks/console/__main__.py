"""`make bench-console`: what open pages of the console cost the aggregator, by turns.

The aggregator, its console, broker, devices and those who watch share the machine. By turns no page
is open, and all are (without, with, with, without, and so on); each turn takes in the same number
of updates. A turn beside the next one are a pair. The run is kept in
benchmarks/results/console.jsonl under its settings.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tabulate import tabulate

from aggregator.console.reader import LEAST_SECONDS
from aggregator.serve.beside import READY, console_command
from benchmarks.aggregator.serving import Served, cpu_seconds, serving
from benchmarks.harness import RESULTS, StoredRuns, progress_line

_WATCHED = (
    *("now",) * 5,
    *("learning",) * 2,
    *("devices", "models", "audit"),
)
"""Of ten pages that are open."""
_PASSWORD = "of a benchmark, no secret"
_PATIENCE_SECONDS = 60.0
_SETTLE_SECONDS = LEAST_SECONDS
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured, by its ``settings``."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """By pair of turns, one without and one with open pages.

    Attributes:
        shares: updates a second with open pages, of those without.
        work: the aggregator's processor time an update, likewise.
        cores: of each process while pages were open.
        fragments: that came to a page in a turn.
        updates_a_second: without open pages.
    """

    shares: Sequence[float]
    work: Sequence[float]
    cores: Mapping[str, float]
    fragments: float
    updates_a_second: float
    load_average: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the table."""
    from aggregator.intervals import interval

    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__)
    parser.add_argument("--pages", type=int, default=50, help="open at once (50)")
    parser.add_argument("--devices", type=int, default=200, help="connected (200)")
    parser.add_argument("--rounds", type=int, default=25, help="in each turn (25)")
    parser.add_argument("--pairs", type=int, default=60, help="of turns (60)")
    parser.add_argument("--table-only", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    named = ("pages", "devices", "rounds", "pairs")
    settings = {name: getattr(options, name) for name in named}
    stored = StoredRuns[Run, Outcome](RESULTS, "console", Outcome)
    measure = None if options.table_only else partial(_measured, settings)
    found = stored.found_or_made(Run(settings), measure)
    if found is None:
        print("nothing was measured with these settings")
        return 1
    costs = interval([100 * (1 - each) for each in found.shares])
    more = interval([100 * (each - 1) for each in found.work])
    rows = [
        ("updates a second, no page open", f"{found.updates_a_second:,.0f}"),
        (f"of them, cost of {options.pages} open pages, %", _with_interval(costs)),
        ("the aggregator's processor time an update: more, %", _with_interval(more)),
        ("pairs of turns", str(len(found.shares))),
        ("times a page changed in a turn", f"{found.fragments:.1f}"),
    ]
    for name, cores in sorted(found.cores.items()):
        rows.append((f"  cores of {name}, pages open", f"{cores:.2f}"))
    print(tabulate(rows, headers=("", "mean [95 %]"), disable_numparse=True))
    return 0


def _with_interval(over: Any) -> str:
    return f"{over.mean:.1f} [{over.mean - over.half_width:.1f}, {over.mean + over.half_width:.1f}]"


def _measured(settings: Mapping[str, int]) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        return measure_open_pages(
            settings["pages"],
            settings["devices"],
            settings["rounds"],
            settings["pairs"],
            Path(name),
        )


def measure_open_pages(pages: int, devices: int, rounds: int, pairs: int, folder: Path) -> Outcome:
    """``pairs`` of turns, each of ``rounds`` in which ``devices`` send an update and wait for its
    receipt, with no and with ``pages`` open."""
    load, updates = os.getloadavg()[0], devices * rounds
    seconds: dict[bool, list[float]] = {False: [], True: []}
    work: dict[bool, list[float]] = {False: [], True: []}
    busy: Counter[str] = Counter()
    fragments = 0
    with (
        serving(devices, folder, 60) as served,
        _console(folder) as console,
        progress_line("open pages") as tell,
    ):
        cookie = _logged_in(console.port)
        served.load.open_sessions()
        served.load.run(updates)  # a turn to warm up
        for number in range(pairs):
            tell(f"pair {number + 1} of {pairs}")
            for are_open in (False, True) if number % 2 == 0 else (True, False):
                with ExitStack() as stack:
                    watching = None
                    if are_open:
                        watching = stack.enter_context(_watching(console.port, cookie, pages))
                    time.sleep(_SETTLE_SECONDS)
                    took, used = _turn(served, console.pid, updates)
                    if watching is not None:
                        fragments += watching.fragments()
                        busy.update(used)
                seconds[are_open].append(took)
                work[are_open].append(max(used["aggregator"], _TICK_SECONDS))
    return Outcome(
        [one / other for one, other in zip(seconds[False], seconds[True], strict=True)],
        [one / other for one, other in zip(work[True], work[False], strict=True)],
        {name: used / sum(seconds[True]) for name, used in busy.items()},
        fragments / (pairs * pages),
        pairs * updates / sum(seconds[False]),
        load,
    )


def _turn(served: Served, console: int, updates: int) -> tuple[float, dict[str, float]]:
    """Seconds, and processor seconds by process."""
    pids = {
        "aggregator": served.pid,
        "broker": served.broker.pid,
        "console": console,
        "fleet": os.getpid(),
    }
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    took = served.load.run(updates)
    return took, {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}


# The console.


@dataclass(frozen=True)
class _Console:
    port: int
    pid: int


@contextmanager
def _console(folder: Path) -> Iterator[_Console]:
    """As ``serve`` starts it, over the home that :func:`serving` made."""
    home, password, log = folder / "home", folder / "password", folder / "console.log"
    password.write_text(f"{_PASSWORD}\n")
    user = ["console", "user", "add", "eve", "--password-file", str(password)]
    made = [sys.executable, "-m", "aggregator.cli", *user, "--home", str(home)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*console_command(home, home / "task.toml"), "--address", f"127.0.0.1:{port}"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file)
    try:
        until = time.monotonic() + _PATIENCE_SECONDS
        while READY.encode() not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the console did not come up: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield _Console(port, process.pid)
    finally:
        process.communicate(timeout=_PATIENCE_SECONDS)


def _logged_in(port: int) -> str:
    """The session's cookie."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_SECONDS)
    with closing(connection):
        connection.request(
            "POST",
            "/login",
            urlencode({"name": "eve", "password": _PASSWORD, "to": "/now"}),
            {
                "Content-Type": "application/x-www-form-urlencoded",
                "Origin": f"http://127.0.0.1:{port}",
            },
        )
        given = connection.getresponse().getheader("Set-Cookie")
    if given is None:
        raise RuntimeError("the console let nobody in")
    return given.partition(";")[0]


# Those who watch, in a process of their own.


@dataclass
class _Watching:
    _ours: Connection

    def fragments(self) -> int:
        """That came to all pages so far."""
        self._ours.send(None)
        return int(self._ours.recv())


@contextmanager
def _watching(port: int, cookie: str, pages: int) -> Iterator[_Watching]:
    """From when each page has come once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(port, cookie, pages, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(_PATIENCE_SECONDS):
            raise RuntimeError(f"not all of {pages} pages came")
        ours.recv()
        yield _Watching(ours)
    finally:
        process.kill()
        process.join(_PATIENCE_SECONDS)


def _watch(port: int, cookie: str, pages: int, theirs: Connection) -> None:
    """Count what comes; say so once each page has come, and whenever asked."""
    came, told = [0] * pages, False
    with selectors.DefaultSelector() as selector:
        selector.register(theirs, selectors.EVENT_READ)
        for number in range(pages):
            stream = socket.create_connection(("127.0.0.1", port), _PATIENCE_SECONDS)
            # Pages that ask for something else are read for themselves.
            query = urlencode(
                {"page": _WATCHED[number % len(_WATCHED)], "q": f"{number // len(_WATCHED)}"}
            )
            stream.sendall(
                f"GET /events?{query} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                f"Cookie: {cookie}\r\n\r\n".encode()
            )
            selector.register(stream, selectors.EVENT_READ, number)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    theirs.recv()
                    theirs.send(sum(came))
                    continue
                found = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                if not found:
                    raise RuntimeError("the console ended a page's stream")
                came[key.data] += found.count(b"event: fragment")
            if not told and all(came):
                told = True
                theirs.send(None)


if __name__ == "__main__":
    sys.exit(main())
