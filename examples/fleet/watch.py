"""Follows a running fleet: what its devices tell, what its aggregator did, and how long is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aggregator.demo.child import Child, FleetError
from aggregator.demo.serving import RunningAggregator
from examples.fleet.assignment import write_verdicts
from examples.fleet.journal import JournalReader
from examples.fleet.plan import CLASSES, PlannedDevice
from examples.fleet.progress import ClassLine, Progress, Show, Stage, TimeLeft
from examples.fleet.results import FleetResults

ENROL, MEASURE, ROUNDS = "enrolled", "timed", "round"
_POLL_SECONDS = 0.2
_STALLED_SECONDS = 120.0


class FleetWatch:
    """Fills ``results`` from ``journals``, to which whoever starts a process adds its own.

    ``verdict_file`` is written once all devices that time themselves have a k: the median of each
    class, which the whole class trains.
    """

    def __init__(
        self, plan: Sequence[PlannedDevice], results: FleetResults, verdict_file: Path
    ) -> None:
        self._plan = plan
        self._results = results
        self._verdict_file = verdict_file
        self._timing = sum(1 for device in plan if device.times)
        self._time_left = TimeLeft(
            (
                Stage(ENROL, results.run.devices, 0.1),
                Stage(MEASURE, self._timing, 2.0),
                Stage(ROUNDS, results.run.rounds, 1.2),
            ),
            time.monotonic,
        )
        self.journals: list[JournalReader] = []

    def follow(
        self,
        aggregator: RunningAggregator,
        children: Sequence[Child],
        broker_alive: Callable[[], bool],
        show: Show,
    ) -> None:
        """Until the last child has ended. Raises FleetError where a part fails or nothing moves."""
        time_left = self._time_left
        moved, moved_at = None, time.monotonic()
        while any(child.running for child in children):
            self.read()
            detail = self._look(aggregator)
            self._advance()
            show(self._progress(detail))
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
        self.read()
        self._look(aggregator)

    def _why(self) -> str:
        return "".join(f"\n{each.device}: {each.text}" for each in self._results.troubles[-3:])

    def read(self) -> None:
        """Take what the devices have told since the last time."""
        for journal in self.journals:
            for record in journal.new_records():
                self._results.take(record)

    def _look(self, aggregator: RunningAggregator) -> str:
        rounds = aggregator.rounds()
        closed = [row for row in rounds if row.closed_unix_seconds is not None]
        results = self._results
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

    def _advance(self) -> None:
        results, time_left = self._results, self._time_left
        time_left.update(ENROL, len(results.enrolled))
        if len(results.enrolled) == results.run.devices:
            time_left.update(MEASURE, len(results.measured))
        if len(results.measured) == self._timing and not self._verdict_file.exists():
            write_verdicts(
                self._verdict_file,
                {each.name: results.class_k(each.name) or 1 for each in CLASSES},
            )
        if results.closed_rounds:
            time_left.update(ROUNDS, results.closed_rounds)

    def _progress(self, detail: str) -> Progress:
        results, time_left = self._results, self._time_left
        rounds = results.curve_rounds()
        last = rounds[-1] if rounds else None
        found = None if last is None else results.quality.at(last)
        classes = {}
        for each in CLASSES:
            quality = None if last is None else results.quality.at(last, each.name)
            classes[each.name] = ClassLine(
                sum(1 for device in self._plan if device.capacity == each.name),
                results.slowdown(each.name),
                results.ks(each.name),
                None if quality is None else quality.full_hit_ratio,
                None if quality is None else quality.full_ndcg,
            )
        return Progress(
            time_left.stage.name,
            time_left.done,
            time_left.stage.units,
            time_left.share(),
            time_left.seconds(),
            detail if time_left.stage.name == ROUNDS else "",
            results.closed_rounds,
            None if found is None else found.full_hit_ratio,
            None if found is None else found.full_ndcg,
            classes,
        )
