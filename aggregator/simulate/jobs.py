"""Runs played one after another in this process, or several at once in processes of their own.

A process plays runs of single seeds and tells what becomes of them; this one records it. So what
processes there are changes no bit, and one that dies costs the run it was in.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from aggregator.errors import AggregatorError
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.run import Ended, Event, Show, Simulated, play_seed
from device_sdk.system.clock import MonotonicClock

Take = Callable[[Simulated, int, Event], None]


class Unit(NamedTuple):
    """A run of one seed, which is played whole or not at all."""

    simulated: Simulated
    seed: int


class _Failed(NamedTuple):
    why: str


@dataclass(frozen=True)
class _JobWorker:
    process: BaseProcess
    connection: Connection


def play(units: Sequence[Unit], jobs: int, take: Take, show: Show) -> dict[Unit, str]:
    """Play all of them, in their order; those that failed, and why.

    ``take`` gets every event of each, ``show`` a line of where it all is. What is interrupted
    leaves what was taken.
    """
    if jobs > 1 and len(units) > 1:
        return dict(_Jobs(units, take, show).play(min(jobs, len(units))))
    return dict(_here(units, take, show))


def _heading(units: Sequence[Unit], unit: Unit) -> str:
    place = f"{units.index(unit) + 1} of {len(units)}, " if len(units) > 1 else ""
    return f"{place}{unit.simulated.recorder.name}, seed {unit.seed}: "


def _told(show: Show, heading: str, text: str) -> None:
    show(heading + text)


def _here(units: Sequence[Unit], take: Take, show: Show) -> Iterator[tuple[Unit, str]]:
    for unit in units:
        told = partial(_told, show, _heading(units, unit))
        try:
            for event in unit.simulated.play(unit.seed, told):
                take(*unit, event)
        except AggregatorError as error:
            yield unit, str(error)


class _Jobs:
    """The processes, each with at most one unit at a time."""

    def __init__(self, units: Sequence[Unit], take: Take, show: Show) -> None:
        self._units, self._take, self._show = units, take, show
        self._waiting = deque(units)
        self._at: dict[Connection, tuple[_JobWorker, Unit]] = {}
        self._context = multiprocessing.get_context("spawn")  # a fork would lack its threads

    def play(self, jobs: int) -> Iterator[tuple[Unit, str]]:
        try:
            for _ in range(jobs):
                self._next(self._start())
            while self._at:
                for each in wait(list(self._at)):
                    assert isinstance(each, Connection)
                    yield from self._hear(each)
        finally:
            for worker, _ in self._at.values():
                worker.process.terminate()
            for worker, _ in self._at.values():
                worker.process.join()

    def _start(self) -> _JobWorker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _JobWorker(process, ours)

    def _next(self, worker: _JobWorker) -> None:
        """Give the worker the next unit; it ends where there is none."""
        if not self._waiting:
            worker.connection.close()
            worker.process.join()
            return
        unit = self._waiting.popleft()
        self._at[worker.connection] = worker, unit
        simulated = unit.simulated
        with suppress(OSError):  # it died: what is heard of it says so
            worker.connection.send((simulated.settings, simulated.asked.rounds, unit.seed))

    def _hear(self, connection: Connection) -> Iterator[tuple[Unit, str]]:
        worker, unit = self._at[connection]
        try:
            event = connection.recv()
        except (EOFError, OSError):
            del self._at[connection]
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"exit status {code}: what it said stands above"
            if code < 0:
                how = f"signal {-code}: where memory is short, fewer --jobs take less"
            yield unit, f"its process was ended by {how}"
            if self._waiting:
                self._next(self._start())
            return
        if isinstance(event, str):
            self._show(_heading(self._units, unit) + event)
            return
        if isinstance(event, _Failed):
            yield unit, event.why
        else:
            self._take(*unit, event)
        if isinstance(event, (_Failed, Ended)):
            del self._at[connection]
            self._next(worker)


def _work(connection: Connection) -> None:
    """A process of its own: plays what it is given, and tells what becomes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    with suppress(EOFError, OSError):  # whoever asks is gone
        while True:
            settings, rounds, seed = connection.recv()
            try:
                for event in play_seed(
                    settings, rounds, seed, DeviceSettings.make, MonotonicClock(), connection.send
                ):
                    connection.send(event)
            except AggregatorError as error:
                connection.send(_Failed(str(error)))
