"""What a device tells its app while it runs, and how: callbacks on a thread of their own."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from device_sdk.fields import Declared, plain, read
from device_sdk.status import left_out
from device_sdk.system.lock import LiveFile, read_live_file
from device_sdk.world import DeviceWorld

_log = logging.getLogger("tessera.device")


@dataclass(frozen=True, slots=True)
class ConnectedEvent:
    """``connected``: the broker, named without user and password, has accepted the connection."""

    broker: str


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """``round``: a round ended on this device; ``outcome`` and ``detail`` as in the status."""

    task: str
    round: int
    version: int
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """``model``: another model is here to recommend or predict with, of this version and round."""

    task: str
    version: int
    round: int


@dataclass(frozen=True, slots=True)
class ProblemEvent:
    """``problem``: what the status' ``problem`` has said for two seconds; empty: it came right."""

    text: str


DeviceEvent: TypeAlias = ConnectedEvent | RoundEvent | ModelEvent | ProblemEvent
EventName: TypeAlias = Literal["connected", "round", "model", "problem"]
_KINDS: dict[str, type[Any]] = {
    "connected": ConnectedEvent,
    "round": RoundEvent,
    "model": ModelEvent,
    "problem": ProblemEvent,
}
_MOST_WAITING = 256
_GOODBYE_SECONDS = 1.0


class Callbacks:
    """Calls an app's functions with events, in order, on one daemon thread.

    A function that raises is logged, and the next one is called. One that hangs keeps events from
    the others and nothing else: at most 256 events wait, and then the oldest are dropped.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._functions: list[tuple[type[Any], Callable[[Any], object]]] = []
        self._waiting: deque[DeviceEvent] = deque()
        self._dropped = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def on(self, event: str, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``callback`` with each ``event`` to come; returns what ends that.

        Raises ValueError for an unknown event and TypeError for what cannot be called.
        """
        kind = _KINDS.get(event)
        if kind is None:
            raise ValueError(f"{event!r} is no event; expected one of {', '.join(_KINDS)}")
        if not callable(callback):
            raise TypeError(f"{callback!r} cannot be called; expected a function of one event")
        entry = (kind, callback)
        with self._changed:
            self._functions.append(entry)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="tessera-events", daemon=True
                )
                self._thread.start()

        def end() -> None:
            with self._changed:
                self._functions = [each for each in self._functions if each is not entry]

        return end

    def tell(self, event: DeviceEvent) -> None:
        """Have ``event`` told. Never waits."""
        with self._changed:
            if self._closed or not any(isinstance(event, kind) for kind, _ in self._functions):
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                if not self._dropped:
                    _log.warning("a callback takes too long: the oldest events are dropped")
                self._dropped = True
            self._waiting.append(event)
            self._changed.notify()

    def close(self) -> None:
        """Tell what waits, for a second at most, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GOODBYE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                event = self._waiting.popleft()
                functions = [call for kind, call in self._functions if isinstance(event, kind)]
            for call in functions:
                try:
                    call(event)
                except BaseException:  # sys.exit() too: it would end the thread for all others
                    _log.exception("the app's callback failed for %r", event)


# What a running device is at, told in a file to others, and what changed, told to the app.

LIVE_FILE = "running.json"


@dataclass(frozen=True, slots=True)
class Live(Declared):
    """The state of a running device.

    Attributes:
        connected, session: whether broker and aggregator are reached.
        working_on: the rounds in hand, by their tasks.
        problem: what is wrong now with all that the device does; empty for nothing.
        problems: what is wrong with single tasks, by their names.
        process: the process's number.
        unix_seconds: since when it is so, by the machine's clock.
        left_out: tasks that it takes no part in, and why.
    """

    connected: bool = False
    session: bool = False
    working_on: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    process: int = 0
    unix_seconds: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)

    def problem_of(self, task: str) -> str:
        """What keeps a task from going well; empty for nothing."""
        return self.problem or self.problems.get(task, "")


def read_live(folder: Path) -> Live | None:
    """What a running process says; None where none runs, or it cannot be known."""
    return parse_live(read_live_file(folder / LIVE_FILE))


def parse_live(data: bytes) -> Live | None:
    """Of a file's bytes; None for what no device wrote, or has not written whole yet."""
    try:
        return read(Live, json.loads(data))
    except (ValueError, RecursionError):
        return None


# A problem that comes right sooner (as it does at every start) is nobody's business.
_LASTS_SECONDS = 2.0


class Observer:
    """Looks at what was committed and at a running device's state, after each piece of its work.

    Everything is told after it is on the disk. A look that fails is logged once, and harms nothing.
    """

    def __init__(self, world: DeviceWorld, callbacks: Callbacks) -> None:
        self._world, self._home = world, world.home
        self._callbacks = callbacks
        self._file = LiveFile(world.home.folder / LIVE_FILE)
        self._live: Live | None = None
        self._changes = -1
        self._written: Live | None = None
        self._left_out: tuple[object, Mapping[str, str]] = None, {}
        self._rounds = world.home.rounds.newest()
        self._models = world.home.models.marks()
        self._model_came = threading.Condition()
        self._closed = False
        self._failed = False
        self._told = ""
        self.next_seconds = math.inf
        """By the clock, when a problem will have lasted long enough to be told; to look again."""

    def look(self, live: Live, broker: Callable[[], str]) -> None:
        """Tell what is other than at the last look; ``broker``: the one in use. Never raises."""
        before, self._live = self._live, live
        try:
            if live.connected and not (before and before.connected):
                self._callbacks.tell(ConnectedEvent(broker()))
            self._look_at_problem(live.problem or next(iter(live.problems.values()), ""))
            changes = self._home.database.changes
            if changes != self._changes:
                self._changes = changes
                self._look_into_home()
            # It goes by the home, and by what the app gives.
            seen = changes, frozenset({} if self._world.data is None else self._world.data())
            if seen != self._left_out[0]:
                self._left_out = seen, left_out(self._world)
            told = replace(live, left_out=self._left_out[1])
            if told != self._written:
                self._file.tell(plain(replace(told, unix_seconds=int(time.time()))))
                self._written = told
        except Exception:
            if not self._failed:
                _log.exception("what the device does cannot be told")
            self._failed = True

    def _look_at_problem(self, problem: str) -> None:
        now = self._world.clock()
        if problem in ("", self._told):
            self.next_seconds = math.inf
        elif self.next_seconds == math.inf:
            self.next_seconds = now + _LASTS_SECONDS
        if problem != self._told and (not problem or now >= self.next_seconds):
            self._told, self.next_seconds = problem, math.inf
            self._callbacks.tell(ProblemEvent(problem))

    def _look_into_home(self) -> None:
        models = self._home.models.marks()
        news = {task: mark for task, mark in models.items() if self._models.get(task) != mark}
        with self._model_came:
            self._models = models
            self._model_came.notify_all()
        for number, part in self._home.rounds.concluded_after(self._rounds):
            self._rounds = number
            self._callbacks.tell(
                RoundEvent(part.task, part.round, part.version, part.outcome.value, part.detail)
            )
        for task, (_, round_, version) in news.items():
            self._callbacks.tell(ModelEvent(task, version, round_))

    def stopped(self) -> None:
        """The device does not run any more."""
        self._file.close()
        self._live = self._written = None

    def wait_for_model(self, task: str, timeout_seconds: float | None) -> bool:
        """Whether a model of ``task`` is here, waiting for one; False also once closed."""
        with self._model_came:
            self._model_came.wait_for(lambda: self._closed or task in self._models, timeout_seconds)
            return task in self._models and not self._closed

    def close(self) -> None:
        """Whoever waits goes on."""
        with self._model_came:
            self._closed = True
            self._model_came.notify_all()
        self._callbacks.close()
        self._file.close()
