"""The fleet's run: what its devices chose, sent and hold, and how good each version is."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from aggregator.demo.baselines import Examiner, Reached
from aggregator.demo.child import FleetError
from aggregator.demo.digits import DealtDigits
from aggregator.demo.fleet import FleetMember, LocalFleet, local_fleet
from aggregator.demo.plan import CLASSES, ClassPace, digits_method, digits_task
from aggregator.demo.work_clock import WorkClock
from device_sdk import Device, LocalData, TrainingOptions

_CAPABILITY_SECONDS = 0.5
_FINAL_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_MOST_TURN_SECONDS = 20.0


@dataclass(frozen=True)
class DeviceAccount:
    """What a device says of itself at the end, and how many of the test pictures it names.

    ``p90_seconds``: a round's training, as it was timed.
    """

    name: str
    capacity: str
    rung: str
    reason: str
    p90_seconds: float | None
    sent_bytes: int
    accuracy: float


@dataclass
class DigitsResults:
    """Filled while the demo runs.

    ``curve``: by round the accuracy of each rung's part of the version that came of it.
    ``baselines``: by name.
    """

    devices: int
    rounds: int
    seed: int
    pace: ClassPace
    broker: str = ""
    curve: dict[int, Mapping[str, float]] = field(default_factory=dict)
    accounts: list[DeviceAccount] = field(default_factory=list)
    baselines: dict[str, Reached] = field(default_factory=dict)
    updates: int = 0
    seconds: float = 0.0

    def of_class(self, capacity: str) -> list[DeviceAccount]:
        """A class's devices."""
        return [each for each in self.accounts if each.capacity == capacity]

    def rungs_of(self, capacity: str) -> Counter[str]:
        """How many of a class's devices chose which rung."""
        return Counter(each.rung for each in self.of_class(capacity))

    @property
    def held(self) -> dict[str, str]:
        """By class the rung that most of its devices chose."""
        return {name: self.rungs_of(name).most_common(1)[0][0] for name in CLASSES}

    @property
    def fleet(self) -> Reached:
        """What the devices themselves hold at the end."""
        return Reached(
            {name: fmean(each.accuracy for each in self.of_class(name)) for name in CLASSES},
            {name: fmean(each.sent_bytes for each in self.of_class(name)) for name in CLASSES},
        )


class OneByOne:
    """Lets devices choose their rung one after another.

    They share a machine: all at once, each would time the others. Whoever has the turn keeps it
    until its first update is made, or so long that something must be the matter with it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock, self._since = threading.Lock(), clock, 0.0
        self._has: str | None = None
        self._had: set[str] = set()

    def may(self, name: str) -> bool:
        """What :class:`TrainingOptions` ask, as ``only_when``."""
        with self._lock:
            if self._has is not None and self._clock() - self._since > _MOST_TURN_SECONDS:
                self._passes_on()
            if self._has is None and name not in self._had:
                self._has, self._since = name, self._clock()
            return name in self._had or name == self._has

    def _passes_on(self) -> None:
        if self._has is not None:
            self._had.add(self._has)
        self._has = None

    @contextmanager
    def passed_on(
        self, devices: Mapping[str, Device], show: Callable[[int, str], None]
    ) -> Iterator[None]:
        """Pass the turn on while the block runs; ``show`` how many have had it."""
        over = threading.Event()

        def watch() -> None:
            while len(self._had) < len(devices) and not over.wait(_LOOK_SECONDS):
                has = self._has
                if has is not None and devices[has].status().k_reason:
                    with self._lock:
                        self._passes_on()
                    show(0, f"{len(self._had)} of {len(devices)} devices have timed themselves")

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()


def run_fleet(
    dealt: DealtDigits,
    results: DigitsResults,
    yardstick_seconds: float,
    folder: Path,
    broker: str | None,
    show: Callable[[int, str], None],
) -> None:
    """Play all rounds over a real broker. Raises FleetError; KeyboardInterrupt as it comes."""
    began = time.monotonic()
    pace = results.pace
    task = digits_task(results.rounds, pace.train_seconds)
    classes = {f"device-{n + 1:02}": CLASSES[n % len(CLASSES)] for n in range(results.devices)}
    turns = OneByOne()
    members = [
        FleetMember(
            name,
            LocalData(train),
            TrainingOptions(
                slowdown=pace.slowdowns[capacity],
                capability_seconds=_CAPABILITY_SECONDS,
                providers="cpu",
                only_when=partial(turns.may, name),
            ),
            WorkClock(yardstick_seconds),
        )
        for (name, capacity), train in zip(classes.items(), dealt.train, strict=True)
    ]
    examiner = Examiner(dealt.test)
    method = digits_method(np.random.default_rng(results.seed))
    with (
        local_fleet(task, members, folder, broker=broker) as fleet,
        turns.passed_on(fleet.devices, show),
    ):
        results.broker = fleet.broker.name
        for row in fleet.rounds():
            results.updates += row.participants or 0
            method.restore(fleet.state())
            full = method.model_arrays
            assert full is not None
            found = {rung: examiner.accuracy(full, rung) for rung in pace.seconds}
            results.curve[row.round] = found
            show(row.round, f"accuracy {min(found.values()):.3f} to {max(found.values()):.3f}")
        fleet.settle()
        _wait_for_the_last_version(fleet)
        for name, device in fleet.devices.items():
            results.accounts.append(_account(name, classes[name], device, dealt))
    results.seconds = time.monotonic() - began


def _wait_for_the_last_version(fleet: LocalFleet) -> None:
    until = time.monotonic() + _FINAL_SECONDS
    for name, device in fleet.devices.items():
        while device.status().version != fleet.task.rounds:
            if time.monotonic() > until:
                raise FleetError(f"{name} did not get the last version: {device.status()}")
            time.sleep(0.05)


def _account(name: str, capacity: str, device: Device, dealt: DealtDigits) -> DeviceAccount:
    status = device.status()
    right = device.predict({"x": dealt.test["x"]})["logits"].argmax(axis=1) == dealt.test["y"]
    return DeviceAccount(
        name,
        capacity,
        status.artifact,
        status.k_reason,
        status.step_p90_seconds,
        status.sent_bytes,
        float(right.mean()),
    )
