"""Time that passes when a test says so, for threads that wait on events."""

from __future__ import annotations

import threading

from tests.fakes.waiting import PATIENCE_SECONDS


class HeldTime:
    """``seconds`` stand still while anybody who has an :meth:`event` does something, and pass in
    :meth:`step` from one moment for which one of them waits to the next. So everything that happens
    takes no time, and happens in the same order on any machine."""

    def __init__(self, seconds: float = 1e9) -> None:
        self.seconds = seconds
        self.changed = threading.Condition()
        self._events: list[HeldEvent] = []

    def now(self) -> float:
        return self.seconds

    def event(self) -> HeldEvent:
        """Of one thread at a time."""
        made = HeldEvent(self)
        self._events.append(made)
        return made

    def forget(self, event: HeldEvent) -> None:
        """Whoever waits on it is frozen, or gone."""
        self._events.remove(event)

    def step(self, until_seconds: float) -> None:
        """To the next moment for which somebody waits, or up to this one."""
        with self.changed:
            self._settle()
            due = [each.until_seconds for each in self._events if each.until_seconds is not None]
            self.seconds = min(until_seconds, *due)
            for each in self._events:
                if each.until_seconds == self.seconds:
                    each.until_seconds = None
            self.changed.notify_all()
            self._settle()

    def _settle(self) -> None:
        assert self.changed.wait_for(
            lambda: all(each.until_seconds is not None for each in self._events),
            PATIENCE_SECONDS,
        )


class HeldEvent(threading.Event):
    """Waits in held time. ``until_seconds`` None: nobody waits on it at present."""

    def __init__(self, time: HeldTime) -> None:
        super().__init__()
        self._time = time
        self.until_seconds: float | None = None

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        with self._time.changed:
            until = self.until_seconds = self._time.seconds + timeout
            self._time.changed.notify_all()
            self._time.changed.wait_for(lambda: self.is_set() or self.until_seconds != until)
        return self.is_set()

    def end_wait(self) -> None:
        """Of somebody whom time has forgotten."""
        with self._time.changed:
            self.until_seconds = None
            self._time.changed.notify_all()

    def set(self) -> None:
        with self._time.changed:
            super().set()
            self._time.changed.notify_all()
