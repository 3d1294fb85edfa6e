"""What a device tells its app while it runs, and how: callbacks on a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


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
_log = logging.getLogger("tessera.device")


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
