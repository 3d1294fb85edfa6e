"""Runs a whole fleet on this machine: broker, aggregator, device processes, and what they found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.demo.broker import running_broker
from aggregator.demo.child import Child
from aggregator.demo.serving import serving
from aggregator.demo.work_clock import WorkClock, yardstick_seconds
from device_sdk.wire.publish.catalogue import Catalogue
from examples.fleet.assignment import AssignedDevice, AssignedUser, Assignment
from examples.fleet.calibration import LIKE_SLOWDOWN, round_seconds
from examples.fleet.data import FleetData
from examples.fleet.journal import JournalReader
from examples.fleet.plan import (
    PlannedDevice,
    budget_seconds,
    class_named,
    deadline_seconds,
    plan_devices,
    slowdown,
)
from examples.fleet.progress import Show
from examples.fleet.recommender_task import FleetSettings, make_aggregator
from examples.fleet.results import FleetResults, Run
from examples.fleet.watch import FleetWatch


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """``mosquitto``: the broker's executable, None for amqtt. ``shown``: users to recommend to."""

    mosquitto: str | None
    devices: int = 48
    processes: int = 4
    rounds: int = 10
    columns: int = 128
    shown: int = 3
    seed: int = 0


class Fleet:
    """One run. ``results`` fill while :meth:`run` works, and stay when it is interrupted."""

    def __init__(self, data: FleetData, options: FleetOptions, folder: Path) -> None:
        self._data = data
        self._options = options
        self._folder = folder
        self._rng = np.random.default_rng(options.seed)
        counts = [len(rows) for rows in data.split.train]
        self._verdict_file = folder / "classes.json"
        self.plan = plan_devices(counts, options.devices, options.processes)
        self._calibrate(counts)

    def _calibrate(self, counts: Sequence[int]) -> None:
        data, options = self._data, self._options
        self._yardstick_seconds = yardstick_seconds()
        first = self.plan[0]
        p90 = round_seconds(
            [data.split.train[user] for user in first.users],
            data.split.items,
            options.columns,
            WorkClock(self._yardstick_seconds),
            self._rng,
            slowdown=LIKE_SLOWDOWN,
        )
        self.results = FleetResults(
            Run(
                data.name,
                data.origin,
                data.synthetic,
                data.negatives,
                len(counts),
                data.split.items,
                data.interactions,
                options.devices,
                options.processes,
                options.rounds,
                options.columns,
                budget_seconds(p90, options.columns),
                p90,
                data.baselines(self._rng),
            )
        )

    def run(self, show: Show, broker_name: Callable[[str], None]) -> None:
        """Start everything, wait for the last round, stop everything.

        Raises FleetError where a part fails, KeyboardInterrupt as it comes; the children have ended
        then, and ``results`` hold what they told.
        """
        options, results = self._options, self.results
        began = time.monotonic()
        watch = FleetWatch(self.plan, results, self._verdict_file)
        try:
            with ExitStack() as stack:
                broker = stack.enter_context(running_broker(self._folder, options.mosquitto))
                results.broker = broker.name
                broker_name(broker.name)
                codes = self._make_aggregator(broker.url)
                aggregator = stack.enter_context(serving(self._folder / "aggregator", self._folder))
                children = self._start_devices(broker.url, codes, stack, watch.journals)
                watch.follow(aggregator, children, broker.alive, show)
                results.refused_by_aggregator = aggregator.refusals()
        finally:
            watch.read()
            results.seconds = time.monotonic() - began

    def _make_aggregator(self, url: str) -> list[str]:
        data, options = self._data, self._options
        return make_aggregator(
            self._folder / "aggregator",
            url,
            Catalogue(data.item_ids, data.titles),
            FleetSettings(
                options.devices,
                options.rounds,
                options.columns,
                self.results.run.train_seconds,
                deadline_seconds(self.plan),
            ),
        )

    def _start_devices(
        self, url: str, codes: Sequence[str], stack: ExitStack, journals: list[JournalReader]
    ) -> list[Child]:
        shown = self._shown_users()
        children: list[Child] = []
        for process in range(self._options.processes):
            name = f"devices-{process + 1}"
            journal = self._folder / f"{name}.jsonl"
            assignment = self._folder / f"{name}.json"
            Assignment(
                url,
                self._options.rounds,
                self._options.columns,
                self.results.run.train_seconds,
                self._yardstick_seconds,
                str(journal),
                str(self._verdict_file),
                str(self._folder / "turn.lock"),
                self._data.item_ids,
                self._data.titles,
                shown,
                tuple(
                    self._assigned(device, code)
                    for device, code in zip(self.plan, codes, strict=True)
                    if device.process == process
                ),
            ).write(assignment)
            command = [sys.executable, "-m", "examples.fleet.device_process", str(assignment)]
            child = Child.start(name, command, self._folder)
            children.append(child)
            journals.append(JournalReader(journal))
            stack.callback(child.stop)
        # All are asked before the first is waited for.
        stack.callback(_ask_to_stop, children)
        return children

    def _assigned(self, device: PlannedDevice, code: str) -> AssignedDevice:
        data = self._data
        users = tuple(
            AssignedUser(
                f"user {data.user_ids[row]}",
                tuple(data.split.train[row].tolist()),
                int(data.split.held_out[row]),
                tuple(data.split.negatives[row].tolist()),
            )
            for row in device.users
        )
        home = self._folder / "homes" / device.name
        run = self.results.run
        factor = slowdown(
            run.round_p90_seconds,
            class_named(device.capacity).about_k,
            run.columns,
            run.train_seconds,
        )
        return AssignedDevice(
            device.name, device.capacity, str(home), code, factor, device.times, users
        )

    def _shown_users(self) -> tuple[str, ...]:
        """Users of different classes, each with enough of a history to recognise their taste."""
        chosen: list[str] = []
        counts = [len(rows) for rows in self._data.split.train]
        for device in self.plan[: self._options.shown]:
            known = [row for row in device.users if 20 <= counts[row] <= 150] or device.users
            row = int(self._rng.choice(np.asarray(known)))
            chosen.append(f"user {self._data.user_ids[row]}")
        return tuple(chosen)


def _ask_to_stop(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()
