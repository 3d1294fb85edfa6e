"""One of the devices that a process holds: a home folder, an identity, its users."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from aggregator.demo.work_clock import WorkClock
from device_sdk import Device, TrainingOptions
from device_sdk.errors import DeviceError
from device_sdk.home.home import Home
from device_sdk.home.round_store import RoundOutcome
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from examples.fleet.assignment import AssignedDevice, Assignment
from examples.fleet.evaluate import device_quality
from examples.fleet.journal import Finished, Measured, RoundQuality, UserShown
from examples.fleet.plan import MEASURE_SECONDS

_ENROL_SECONDS = 60.0
# Emulated seconds for one measurement of k: room for hundreds of runs of a few milliseconds.
_CAPABILITY_SECONDS = 1.5
_FINAL_SECONDS = 15.0
_POLL_SECONDS = 0.02
_SHOWN = 8


class HeldDevice:
    """Enrols once; may time itself in the first round; then trains with its class's k."""

    def __init__(self, assigned: AssignedDevice, assignment: Assignment) -> None:
        self.assigned = assigned
        self._assignment = assignment
        self._split = assigned.split(len(assignment.item_ids))
        self._home = Path(assigned.home)
        self._device: Device | None = None
        self._reader: Home | None = None
        self._k: int | None = None
        self._first_round = 1
        self._evaluated = 0
        self._ended_seconds: float | None = None

    def enrol(self) -> None:
        """Get an identity, and record what the users did. Raises DeviceError or HomeError."""
        ids = self._assignment.item_ids
        with Device.enrol(
            self._assignment.broker_url,
            self.assigned.code,
            self._home,
            timeout_seconds=_ENROL_SECONDS,
        ) as device:
            device.record_all(
                (ids[row], user.name) for user in self.assigned.users for row in user.train
            )

    def measure(self, stopping: Callable[[], bool]) -> Measured | None:
        """Take part in one round with a k found by timing; None where none came of it.

        The fleet's devices do this one at a time: dozens at once on the same cores would time each
        other.
        """
        device = self._open(None)
        device.start()
        until = time.monotonic() + MEASURE_SECONDS
        status = device.status()
        while (status.trained_round is None or status.outbox) and not stopping():
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
            status = device.status()
        self.close()
        if status.trained_round is None or status.k is None:
            return None
        self._first_round = status.trained_round + 1
        return Measured(
            self.assigned.name,
            self.assigned.capacity,
            self.assigned.slowdown,
            status.k,
            status.step_p90_seconds,
            status.k_reason,
        )

    def start(self, k: int) -> None:
        """Take part in every round from now on, with the k of the device's class."""
        self._k = k
        self._device = self._open(self._k)
        self._reader = Home(self._home, read_only=True)
        self._device.start()

    def evaluate(self) -> RoundQuality | None:
        """Quality for the device's own users, once for each round that it trained, and once for
        the final version, which the aggregator publishes as one round more, for nobody to train.
        """
        assert self._reader is not None
        models, task = self._reader.models, self._task()
        mark = models.model_mark(task)
        if mark is None or mark[1] <= self._evaluated:
            return None
        with self._reader.database.transaction("BEGIN"):
            model = models.model(task)
        if model is None:
            return None
        self._evaluated = model.round
        # As it would recommend: full width, today's likes, the last matrix it got.
        problem = LeastSquares.of(model.arrays)
        users = problem.vectors([Likes.of(rows) for rows in self._split.train])
        items = model.arrays["items"].astype("float32", copy=False)
        return device_quality(
            self.assigned.name,
            self.assigned.capacity,
            model.round,
            self._k or 0,
            users,
            items,
            self._split,
        )

    def is_done(self) -> bool:
        """Whether the last round was trained here, its receipt came, and the final version with
        it; after some seconds without that one, too."""
        assert self._device is not None
        status = self._device.status()
        ended = status.round is not None and status.round >= self._assignment.rounds
        if not ended or status.outbox:
            return False
        if self._ended_seconds is None:
            self._ended_seconds = time.monotonic()
        waited = time.monotonic() - self._ended_seconds
        return self._evaluated > self._assignment.rounds or waited > _FINAL_SECONDS

    def account(self) -> Finished:
        """What the device says about its part in the rounds."""
        assert self._device is not None
        status = self._device.status()
        trained = self._train_seconds(status.trained_round or 0)
        return Finished(
            self.assigned.name,
            self.assigned.capacity,
            status.k or 0,
            len(trained),
            status.sent_bytes,
            sum(trained) / len(trained) if trained else None,
            status.outbox,
            dict(status.refused),
        )

    def problem(self) -> str:
        """What the device has trouble with now; empty for nothing."""
        return "" if self._device is None else self._device.status().problem

    def show(self, name: str) -> UserShown | None:
        """One of this device's users, with recommendations by title; None for others' users."""
        assert self._device is not None
        user = next((each for each in self.assigned.users if each.name == name), None)
        if user is None:
            return None
        titles = self._assignment.titles
        best = self._device.recommend(_SHOWN, name)
        return UserShown(
            self.assigned.name,
            name,
            self._k or 0,
            tuple(titles[row] for row in user.train[-_SHOWN:]),
            tuple(self._device.title(item) or item for item, _ in best),
            titles[user.held_out],
        )

    def close(self) -> None:
        """Stop, and give the home back."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._device is not None:
            with contextlib.suppress(DeviceError):
                self._device.close()
            self._device = None

    def _open(self, k: int | None) -> Device:
        options = TrainingOptions(
            k=k, slowdown=self.assigned.slowdown, capability_seconds=_CAPABILITY_SECONDS
        )
        clock = WorkClock(self._assignment.yardstick_seconds)
        self._device = Device.open(self._home, options=options, work_clock=clock)
        return self._device

    def _task(self) -> str:
        assert self._device is not None
        return self._device.status().task

    def _train_seconds(self, last_round: int) -> list[float]:
        """Of each round trained since :meth:`start`, which is since when bytes are counted."""
        assert self._reader is not None
        mark = self._reader.models.model_mark(self._task())
        generation = 0 if mark is None else mark[0]
        parts = (
            self._reader.rounds.participation(self._task(), generation, number)
            for number in range(self._first_round, last_round + 1)
        )
        return [
            part.train_seconds or 0.0
            for part in parts
            if part is not None and part.outcome is RoundOutcome.TRAINED
        ]
