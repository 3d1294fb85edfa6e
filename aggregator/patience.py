"""Ends a call of somebody else's code that does not come back."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aggregator.errors import CallOverdue

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class _Call:
    call: str
    began_seconds: float
    told: bool = False
    ended: bool = False


class Patience:
    """Ends a call of a method's code that does not come back, by an exception raised inside it.

    It looks on from a thread of its own, one for all methods of this process. Python code is ended
    between two of its instructions, again and again where it catches that; a single call into
    native code only once it returns.
    """

    def __init__(self, most_seconds: float = 600.0, tell_seconds: float = 30.0) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.most_seconds = most_seconds
        self.tell_seconds = tell_seconds
        """After so long the log names the call."""
        self._running: dict[int, _Call] = {}  # by thread
        self._lock = threading.Lock()
        self._process = 0

    def began(self, call: str) -> bool:
        """This thread begins a call; False within another one, which is the one to end."""
        thread = threading.get_ident()
        if thread in self._running:
            return False
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._look_on, name="tessera-patience", daemon=True).start()
        self._running[thread] = _Call(call, self.clock())
        return True

    def came_back(self) -> None:
        """The call is over; an exception that is on its way to it comes to nobody."""
        thread = threading.get_ident()
        while True:
            try:
                with self._lock:
                    running = self._running.pop(thread, None)
                    if running is not None and running.ended:
                        _raise_in(thread, None)
                return
            except CallOverdue:
                continue  # it came just now

    def _look_on(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            now = self.clock()
            with self._lock:
                for thread, running in list(self._running.items()):
                    self._look_at(thread, running, now - running.began_seconds)

    def _look_at(self, thread: int, running: _Call, seconds: float) -> None:
        if seconds > self.tell_seconds and not running.told:
            running.told = True
            _LOG.warning(
                "a method's %s has run for %.0f s, and nothing else is served meanwhile; it is "
                "ended after %.0f s",
                running.call,
                seconds,
                self.most_seconds,
            )
        if seconds > self.most_seconds:
            running.ended = True
            _raise_in(thread, CallOverdue)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None: nothing, though it was asked for."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


PATIENCE = Patience()
"""Of this process."""
