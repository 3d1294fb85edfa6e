"""Ends a native call that does not come back: past its time, or because the caller has to stop."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from device_sdk.system.clock import Clock, MonotonicClock

Ended = Literal["", "too-long", "stopped"]
_TICK_SECONDS: Final = 1.0
_LAST_WORDS_SECONDS: Final = 1.0


def _goes_down() -> bool:
    """Whether the interpreter does, when no thread begins any more."""
    return sys.is_finalizing() or not threading.main_thread().is_alive()


class Watch:
    """Looks on while another thread makes native calls, each of which has so many seconds.

    Whoever makes the calls adds 1 to :attr:`calls` before and after each of them: an odd number
    is a call in progress. That is all that a call costs; the clock is read by the thread that
    looks on, which is there within :meth:`during` alone. One thread makes calls at a time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.calls = 0
        self.ended: Ended = ""
        """Why calls were ended, within the present or the last :meth:`during`; "stopped" is for
        good."""
        self.called = ""
        """What the last call belongs to, as whoever made it says; "" where there was none within
        the present or the last :meth:`during`."""
        self.begins: Callable[[str], None] = lambda what: None
        """Told what the next calls belong to, before the first of them."""
        self.end_call: Callable[[], None] | None = None
        """Makes the call in progress, and those to come, fail; set by whoever makes them."""
        self._clock: Clock = MonotonicClock() if clock is None else clock

    def calls_for(self, what: str, end_call: Callable[[], None]) -> None:
        """The next call belongs to ``what``, and ``end_call`` ends it."""
        if what != self.called:
            self.called = what
            self.begins(what)
        self.end_call = end_call

    @contextmanager
    def during(self, most_seconds: float) -> Iterator[None]:
        """Each call within may take so long. At the exit of the program all of them are ended."""
        if self.ended == "too-long":
            self.ended = ""
        self.called = ""
        self.calls += self.calls % 2
        done = threading.Event()
        thread = threading.Thread(
            target=self._look_on, args=(done, most_seconds), name="tessera-watch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if not _goes_down():
                raise  # the machine's limit on threads or memory: the next time may do
            self.end("stopped")
        atexit.register(self._end_at_exit)
        try:
            yield
        finally:
            atexit.unregister(self._end_at_exit)
            done.set()
            if thread.ident is not None:
                thread.join()

    def end(self, why: Ended) -> None:
        """End the call in progress, and those to come: until the next :meth:`during`, or for good
        where it is to stop."""
        self.ended = "stopped" if "stopped" in (why, self.ended) else why
        end_call = self.end_call
        if end_call is not None:
            end_call()

    def _look_on(self, done: threading.Event, most_seconds: float) -> None:
        tick_seconds = min(_TICK_SECONDS, most_seconds / 4)
        seen, spent, looked = self.calls, 0.0, self._clock.now()
        while not done.wait(tick_seconds):
            calls, now = self.calls, self._clock.now()
            # Where this thread was not there either, the whole process was not: a machine asleep,
            # a container that was paused.
            spent += min(now - looked, 2 * tick_seconds)
            looked = now
            if calls != seen or not calls % 2:
                seen, spent = calls, 0.0
            elif spent > most_seconds:
                self.end("too-long")

    def _end_at_exit(self) -> None:
        # A thread inside a native call when the interpreter goes down takes the process with it.
        self.end("stopped")
        seen, waited = self.calls, threading.Event()
        for _ in range(int(_LAST_WORDS_SECONDS / 0.01)):
            if not seen % 2 or self.calls != seen:
                return
            waited.wait(0.01)
