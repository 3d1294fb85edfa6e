"""Runs a whole fleet on this machine: broker, aggregator, device processes, and what they found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_sdk.wire.catalogue import Catalogue
from examples.fleet.aggregator import (
    FleetSettings,
    RunningAggregator,
    make_aggregator,
    serving,
)
from examples.fleet.assignment import (
    AssignedDevice,
    AssignedUser,
    Assignment,
    write_verdicts,
)
from examples.fleet.broker import running_broker
from examples.fleet.calibration import LIKE_SLOWDOWN, round_seconds
from examples.fleet.child import Child
from examples.fleet.data import FleetData
from examples.fleet.errors import FleetError
from examples.fleet.journal import JournalReader
from examples.fleet.plan import (
    CLASSES,
    PlannedDevice,
    budget_seconds,
    class_named,
    plan_devices,
    slowdown,
)
from examples.fleet.progress import ClassLine, Progress, Show, Stage, TimeLeft
from examples.fleet.results import FleetResults, Run
from examples.fleet.training import TRAINING
from examples.fleet.work_clock import WorkClock, yardstick_seconds

__all__ = ["FleetOptions", "Fleet"]

ENROL, MEASURE, ROUNDS = "enrolled", "timed", "round"
_POLL_SECONDS = 0.2
_STALLED_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """``mosquitto``: the broker's executable, None for amqtt. ``shown``: users to recommend to."""

    mosquitto: str | None
    devices: int = 48
    processes: int = 4
    rounds: int = 45
    columns: int = 64
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
            TRAINING,
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
                data.popularity_hit_ratio(),
            )
        )

    def run(self, show: Show, broker_name: Callable[[str], None]) -> None:
        """Start everything, wait for the last round, stop everything.

        Raises FleetError where a part fails, KeyboardInterrupt as it comes; the children have ended
        then, and ``results`` hold what they told.
        """
        options, results = self._options, self.results
        time_left = TimeLeft(
            (
                Stage(ENROL, options.devices, 0.1),
                Stage(MEASURE, self._timing, 2.0),
                Stage(ROUNDS, options.rounds, 1.2),
            ),
            time.monotonic,
        )
        began = time.monotonic()
        journals: list[JournalReader] = []
        try:
            with ExitStack() as stack:
                broker = stack.enter_context(running_broker(self._folder, options.mosquitto))
                results.broker = broker.name
                broker_name(broker.name)
                codes = self._make_aggregator(broker.url)
                aggregator = stack.enter_context(serving(self._folder / "aggregator", self._folder))
                children = self._start_devices(broker.url, codes, stack, journals)
                self._watch(aggregator, children, broker.alive, journals, time_left, show)
                self._look(aggregator)
                results.refused_by_aggregator = aggregator.refusals()
        finally:
            self._read(journals)
            results.seconds = time.monotonic() - began

    @property
    def _timing(self) -> int:
        return sum(1 for device in self.plan if device.times)

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

    def _watch(
        self,
        aggregator: RunningAggregator,
        children: Sequence[Child],
        broker_alive: Callable[[], bool],
        journals: Sequence[JournalReader],
        time_left: TimeLeft,
        show: Show,
    ) -> None:
        moved, moved_at = None, time.monotonic()
        while any(child.running for child in children):
            self._read(journals)
            detail = self._look(aggregator)
            self._advance(time_left)
            show(self._progress(time_left, detail))
            if not aggregator.child.running:
                raise FleetError(f"the aggregator ended:\n{aggregator.child.log_tail()}")
            if not broker_alive():
                raise FleetError("the broker ended")
            for child in children:
                if child.process.returncode not in (None, 0):
                    raise FleetError(f"{child.name} ended:\n{child.log_tail()}")
            state = (time_left.stage.name, time_left.done, detail)
            if state != moved:
                moved, moved_at = state, time.monotonic()
            elif time.monotonic() - moved_at > _STALLED_SECONDS:
                raise FleetError(f"nothing moved for {_STALLED_SECONDS:g} s{self._why()}")
            time.sleep(_POLL_SECONDS)
        self._read(journals)

    def _why(self) -> str:
        return "".join(f"\n{each.device}: {each.text}" for each in self.results.troubles[-3:])

    def _read(self, journals: Sequence[JournalReader]) -> None:
        for journal in journals:
            for record in journal.new_records():
                self.results.take(record)

    def _look(self, aggregator: RunningAggregator) -> str:
        rounds = aggregator.rounds()
        closed = [row for row in rounds if row.closed_unix_seconds is not None]
        results = self.results
        results.closed_rounds = len(closed)
        results.updates_counted = sum(row.participants or 0 for row in closed)
        # The first round is the one in which devices come one at a time, to be timed.
        results.round_seconds = [
            (row.closed_unix_seconds or 0.0) - row.opened_unix_seconds
            for row in closed
            if row.round > 1
        ]
        if not rounds or rounds[0].closed_unix_seconds is not None:
            return ""
        return f"{aggregator.arrived(rounds[0])} of {rounds[0].expected} updates"

    def _advance(self, time_left: TimeLeft) -> None:
        results, options = self.results, self._options
        time_left.update(ENROL, len(results.enrolled))
        if len(results.enrolled) == options.devices:
            time_left.update(MEASURE, len(results.measured))
        if len(results.measured) == self._timing and not self._verdict_file.exists():
            write_verdicts(
                self._verdict_file,
                {each.name: results.class_k(each.name) or 1 for each in CLASSES},
            )
        if results.closed_rounds:
            time_left.update(ROUNDS, results.closed_rounds)

    def _progress(self, time_left: TimeLeft, detail: str) -> Progress:
        results = self.results
        rounds = results.curve_rounds()
        last = rounds[-1] if rounds else None
        found = None if last is None else results.quality.at(last)
        classes = {}
        for each in CLASSES:
            quality = None if last is None else results.quality.at(last, each.name)
            classes[each.name] = ClassLine(
                sum(1 for device in self.plan if device.capacity == each.name),
                results.slowdown(each.name),
                results.ks(each.name),
                None if quality is None else quality.hit_ratio,
                None if quality is None else quality.ndcg,
            )
        return Progress(
            time_left.stage.name,
            time_left.done,
            time_left.stage.units,
            time_left.share(),
            time_left.seconds(),
            detail if time_left.stage.name == ROUNDS else "",
            results.closed_rounds,
            None if found is None else found.hit_ratio,
            None if found is None else found.ndcg,
            classes,
        )


def _ask_to_stop(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()
