"""Sees what changed since it last looked, and tells the app's callbacks and other processes."""

from __future__ import annotations

import logging
import math
import threading
import time

from device_sdk.events import Callbacks, ConnectedEvent, ModelEvent, ProblemEvent, RoundEvent
from device_sdk.home.live import Live, LiveHome
from device_sdk.world import DeviceWorld

# A problem that comes right sooner (as it does at every start) is nobody's business.
_LASTS_SECONDS = 2.0
_log = logging.getLogger("tessera.device")


class Observer:
    """Looks at what was committed and at a running device's state, after each piece of its work.

    Everything is told after it is on the disk. A look that fails is logged once, and harms nothing.
    """

    def __init__(self, world: DeviceWorld, callbacks: Callbacks) -> None:
        self._world, self._home = world, world.home
        self._callbacks = callbacks
        self._file = LiveHome(world.home.folder, time.time)
        self._live = Live()
        self._changes = -1
        self._rounds = world.home.rounds.newest()
        self._models = world.home.models.marks()
        self._model_came = threading.Condition()
        self._closed = False
        self._failed = False
        self._told = ""
        self.next_seconds = math.inf
        """By the clock, when a problem will have lasted long enough to be told; to look again."""

    def look(self, live: Live, broker: str) -> None:
        """Tell what is other than at the last look; ``broker``: the one in use. Never raises."""
        try:
            self._look(live, broker)
        except Exception:
            if not self._failed:
                _log.exception("what the device does cannot be told")
            self._failed = True

    def _look(self, live: Live, broker: str) -> None:
        before, self._live = self._live, live
        if live.connected and not before.connected:
            self._callbacks.tell(ConnectedEvent(broker))
        self._look_at_problem(live.any_problem)
        changes = self._home.database.changes
        if changes != self._changes:
            self._changes = changes
            self._look_into_home()
        self._file.tell(live)

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
        self._live = Live()

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
