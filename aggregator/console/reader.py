"""Reads the fleet for all pages that are open, on one thread, no more often than it may cost."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.errors import AggregatorError
from aggregator.operate.fleet import Fleet
from aggregator.store import STORE_FAILURES
from device_sdk.system.printable import in_words, printable

SHARE = 0.05
"""Of this thread's time."""
LEAST_SECONDS = 1.0
_MOST_KEPT = 256
_ACTOR = "console"


@dataclass(frozen=True, slots=True)
class PageWanted:
    """A page, and what of it is asked for."""

    page: ConsolePage[Any]
    query: PageQuery


@dataclass(frozen=True, slots=True)
class PageReading:
    """What a page shows, at one moment.

    Attributes:
        view: the page's view model; None where it could not be read.
        problem: why it could not be read; empty where it could.
        number: another one with each reading.
    """

    view: object
    problem: str
    number: int
    read_unix_seconds: float
    read_seconds: float


class FleetReader:
    """``clock``: monotonic seconds. Its thread ends with the process, or with :meth:`close`."""

    def __init__(
        self,
        home: Path,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._clock, self._unix_clock = home, clock, unix_clock
        self._changed = Condition()
        self._urgent: dict[PageWanted, Future[PageReading]] = {}
        self._watched: Counter[PageWanted] = Counter()
        self._told: set[Callable[[], None]] = set()
        self._kept: OrderedDict[PageWanted, PageReading] = OrderedDict()
        self._number, self._next_seconds = 0, clock()
        self._closed = False
        Thread(target=self._run, name="fleet reader", daemon=True).start()

    def close(self) -> None:
        """Read nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def ask(self, wanted: PageWanted) -> Future[PageReading]:
        """What it shows now, or did a second ago."""
        with self._changed:
            kept = self._kept.get(wanted)
            if kept is not None and self._clock() - kept.read_seconds < LEAST_SECONDS:
                done: Future[PageReading] = Future()
                done.set_result(kept)
                return done
            if wanted not in self._urgent:
                asked = self._urgent[wanted] = Future()
                # Others ask for it, too: who goes away meanwhile cancels nothing.
                asked.set_running_or_notify_cancel()
                self._changed.notify()
            return self._urgent[wanted]

    @contextmanager
    def watching(self, wanted: PageWanted, tell: Callable[[], None]) -> Iterator[None]:
        """Read it again and again; ``tell`` is called on the reader's thread each time."""
        with self._changed:
            self._watched[wanted] += 1
            self._told.add(tell)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched -= Counter([wanted])
                self._told.discard(tell)

    def last(self, wanted: PageWanted) -> PageReading | None:
        """What it showed when it was read last."""
        return self._kept.get(wanted)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._urgent):
                    left = self._next_seconds - self._clock()
                    if self._watched and left <= 0:
                        break
                    self._changed.wait(left if self._watched else None)
                if self._closed:
                    return
                urgent, self._urgent = self._urgent, {}
                watched = list(self._watched) if self._clock() >= self._next_seconds else []
            self._read(urgent, watched)

    def _read(
        self, urgent: dict[PageWanted, Future[PageReading]], watched: list[PageWanted]
    ) -> None:
        began = self._clock()
        fleet, problem = self._open()
        for wanted in dict.fromkeys([*urgent, *watched]):
            found = self._reading(fleet, problem, wanted)
            with self._changed:
                self._kept[wanted] = found
                self._kept.move_to_end(wanted)
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            if wanted in urgent:
                urgent[wanted].set_result(found)
        if fleet is not None:
            with suppress(Exception):  # all has been read
                fleet.close()
        if watched:
            now = self._clock()
            self._next_seconds = began + max(LEAST_SECONDS, (now - began) / SHARE)
            with self._changed:
                told = list(self._told)
            for tell in told:
                tell()

    def _open(self) -> tuple[Fleet | None, str]:
        # Anew each time: the store may be moved, or be another's file, while a page is open.
        try:
            return Fleet.open(self._home, actor=_ACTOR, clock=self._unix_clock), ""
        except Exception as error:
            return None, _said(error)

    def _reading(self, fleet: Fleet | None, problem: str, wanted: PageWanted) -> PageReading:
        view: object = None
        if fleet is not None:
            try:
                view = wanted.page.read(fleet, wanted.query)
                before = self._kept.get(wanted)
                if (
                    wanted.page.follow is not None
                    and before is not None
                    and before.view is not None
                ):
                    view = wanted.page.follow(before.view, view)
            except Exception as error:  # a page's mistake is no other page's
                view, problem = None, _said(error)
        self._number += 1
        return PageReading(view, problem, self._number, self._unix_clock(), self._clock())


def _said(error: Exception) -> str:
    """Why a page shows nothing."""
    if isinstance(error, (AggregatorError, OSError, *STORE_FAILURES)):
        return printable(str(error))
    return printable(f"this page cannot be made: {in_words(error)}")
