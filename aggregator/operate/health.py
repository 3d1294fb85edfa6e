"""What is true of a fleet: found out here, and told the same by ``status``, the metrics' port and
whoever else asks."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from threading import Condition, Thread

from aggregator.errors import AggregatorError
from aggregator.evaluation import what_it_brings
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome, is_served
from aggregator.keys.registry import Registry
from aggregator.operate.devices import DeviceState, state_of
from aggregator.operate.names import called_all, parts_of, ranking_of
from aggregator.operate.problems import FleetProblem, Severity
from aggregator.operate.waiting import WaitingRound, known
from aggregator.rounds.machine import held
from aggregator.rounds.model_parts import ModelParts
from aggregator.serve.reach import Reach, read_reach
from aggregator.store import STORE_FAILURES, Store, TaskStore
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.reports import KEPT_ROUNDS, OutcomeCount, UnknownItems
from aggregator.store.rows import DeviceRow, RoundRow, TaskRow, WorkerRow
from aggregator.task.evaluation import metric_of
from aggregator.task.file import served_evaluation, served_round, served_selector
from aggregator.task.request import ReplaceRequest
from device_sdk.system.printable import ago, in_words, printable, size, span


@dataclass(frozen=True, slots=True)
class Rollback:
    """What became of the version that was asked for last. ``version``: the one that waits;
    ``dropped``: why it did not become the next one."""

    version: int | None
    dropped: str | None

    @classmethod
    def of(cls, store: TaskStore) -> Rollback:
        """A task's."""
        request = store.fleet.tasks.find(store.number).request
        back_to = None if request is None else ReplaceRequest.read(request).back_to
        awaited = store.versions.awaited()
        return cls(back_to if awaited is None else awaited, store.facts.dropped_rollback)

    @property
    def said(self) -> str | None:
        """For people; None where there is nothing to say."""
        if self.version is not None:
            return f"version {self.version}'s model becomes the next version between two rounds"
        return None if self.dropped is None else printable(self.dropped)


# A task.

_SHUT_OUT_ROUNDS = 5
"""Of which nobody was counted, though devices were selected: any that lives has come by then."""
_NO_QUORUM_ROUNDS = 3
_FEWEST_FAILED = 2
_UNEVALUATED_VERSIONS = 10


class TaskStanding(StrEnum):
    """How a task is doing, in a word."""

    NOT_SERVED = "not served yet"
    REFUSED = "refused"
    HELD = "held"
    PAUSED = "paused"
    RETIRING = "retiring"
    WAITING = "waits for devices"
    FINISHED = "finished"
    STALLED = "stalled"
    LEARNING = "learning"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Seconds from a round's opening to a device's update: of half of the devices at most so long,
    of nine tenths, and of all. Of each device the longest time of late counts."""

    half: float
    nine_tenths: float
    longest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Arrivals | None:
        """None for none."""
        found = sorted(seconds)
        if not found:
            return None
        half, nine_tenths = (math.ceil(share * len(found)) - 1 for share in (0.5, 0.9))
        return cls(found[half], found[nine_tenths], found[-1])


class TaskHealth:
    """One task, as the store has it. What is not asked for is not read; ``most_rounds``: as many of
    the last rounds are shown."""

    def __init__(
        self,
        home: AggregatorHome,
        store: Store,
        row: TaskRow,
        registry: Registry,
        now: float,
        most_rounds: int = 10,
    ) -> None:
        self.row, self.store = row, store.task(row.number)
        self._home, self._registry, self._now = home, registry, now
        self._most_rounds = most_rounds
        self.selector = served_selector(row.served)
        self.eligible = registry.eligible(self.selector.admits)
        """Devices that it is for."""
        self.settings = None if row.served is None else served_round(row.served)
        self.evaluation = None if row.served is None else served_evaluation(row.served)
        self._latest = self.store.rounds.latest(max(most_rounds, _SHUT_OUT_ROUNDS + 1))

    @property
    def name(self) -> str:
        return self.row.name or ""

    @property
    def rounds(self) -> list[RoundRow]:
        """The last ones, newest first."""
        return self._latest[: self._most_rounds]

    @cached_property
    def version(self) -> int:
        """0 before the first."""
        return self.store.checkpoints.version()

    @cached_property
    def evaluated(self) -> EvaluatedVersion | None:
        """The newest version that has figures."""
        return next(iter(self.store.evaluations.latest()), None)

    @cached_property
    def metric(self) -> str:
        """That versions are compared by."""
        return metric_of(ranking_of(self._home, self.store.fleet, self.row))

    @cached_property
    def brings(self) -> str:
        """What federation does, in a sentence; empty where nobody asked."""
        found, asked = self.evaluated, self.evaluation is not None and self.evaluation.has_control
        return "" if found is None else what_it_brings(found.figures, self.metric, asked=asked)

    @cached_property
    def rollback(self) -> Rollback:
        return Rollback.of(self.store)

    @cached_property
    def outcomes(self) -> Sequence[OutcomeCount]:
        """How rounds ended on devices, by round, newest first."""
        return self.store.reports.outcomes()

    @cached_property
    def arrivals(self) -> Arrivals | None:
        """How long after its rounds' openings updates come; None before the first."""
        return Arrivals.of(
            each.seconds for each in self.store.habits.all().values() if each.seconds is not None
        )

    @cached_property
    def parts(self) -> ModelParts:
        return parts_of(self._home, self.store.fleet, self.row)

    @cached_property
    def trained(self) -> dict[str, int]:
        """Devices by the part of the model that they trained last."""
        return self.parts.counts(self.store.participations.widths())

    @cached_property
    def counted_by_part(self) -> dict[str, float]:
        """Of the updates that each device of a part was asked for in the last closed rounds, the
        share that counted: rounds draw devices whatever they train. Closing early favours the
        quick."""
        closed = [each for each in self.rounds if not each.unfinished and each.threshold]
        asked = [each for each in closed if each.generation == closed[0].generation]
        rounds = sum(each.expected for each in asked) / max(1, self.eligible)
        if not rounds:
            return {}
        of = asked[0].generation, asked[-1].round, asked[0].round
        counted = self.parts.counts(self.store.log.counted_by_width(*of))
        return {
            part: min(1.0, counted.get(part, 0) / (devices * rounds))
            for part, devices in self.trained.items()
        }

    @cached_property
    def not_trained(self) -> dict[tuple[str, str], list[DeviceRow]]:
        """On which devices the newest round ended without an update, by outcome and reason."""
        return {
            (each.outcome, each.reason): known(self._registry, each.device_ids)
            for each in self.store.reports.not_trained()
        }

    @cached_property
    def unknown_items(self) -> UnknownItems:
        """Items that devices recorded and the catalogue does not know."""
        return self.store.reports.unknown_items()

    @property
    def open_round(self) -> RoundRow | None:
        row = self._latest[0] if self._latest else None
        return row if row is not None and row.unfinished else None

    @cached_property
    def waiting(self) -> WaitingRound | None:
        """The open round's; None for none, and for one that rests."""
        row = self.open_round
        if self.settings is None or row is None or not row.threshold:
            return None
        return WaitingRound.look(
            self.store, row, self._registry, self.selector, self.settings, self._now
        )

    def counted(self, row: RoundRow) -> int:
        """Updates of a round, so far where it is open."""
        if row.participants is not None:
            return row.participants
        return self.store.log.counted(row.generation, row.round)

    @property
    def wait_for_devices(self) -> int | None:
        """No round opens before there are so many; None: never served."""
        return None if self.settings is None else self.settings.wait_for_devices

    def told(self) -> list[dict[str, str]]:
        """How the last rounds ended on devices, as they told, and on which without an update."""
        newest: Counter[tuple[str, str]] = Counter()
        last: Counter[tuple[str, str]] = Counter()
        number = self.outcomes[0].round
        for each in self.outcomes:
            if each.round > number - KEPT_ROUNDS:
                last[each.outcome, each.reason] += each.devices
            if each.round == number:
                newest[each.outcome, each.reason] += each.devices
        return [
            {
                "told": printable(": ".join(filter(None, why))),
                f"round {number}": str(newest[why]),
                f"last {KEPT_ROUNDS} rounds": str(count),
                "by": called_all(self.not_trained.get(why, [])),
            }
            for why, count in last.most_common()
        ]

    @cached_property
    def problems(self) -> list[FleetProblem]:
        """Those that stand now."""
        return [FleetProblem(code, what, self.row.name) for code, what in self._problems()]

    def _problems(self) -> Iterator[tuple[str, str]]:
        facts, only = self.store.facts, str(self.selector)
        if only and not self.eligible:
            yield "no-device-fits", f"no device has the labels {printable(only)}: no round opens"
        if self.row.problem is not None:
            yield "task-refused", printable(self.row.problem)
        if facts.no_room:
            yield "no-room", f"no round opens: {printable(facts.no_room)}"
        if (why := held(self.store)) is not None:
            number = self._latest[0].round if self._latest else 0
            number += 1 if facts.unpublished is not None else 0
            yield "round-held", f"round {number} is held: {printable(why)}"
        if self._lacks_devices:
            yield (
                "too-few-devices",
                f"no round opens before {self.wait_for_devices} devices are enrolled "
                f"(round.wait_for_devices); there are {self.eligible}",
            )
        # Those that rest, and those that nobody was selected for, say nothing.
        closed = [r for r in self._latest if not r.unfinished and r.threshold and r.expected]
        shut_out, no_quorum = closed[:_SHUT_OUT_ROUNDS], closed[:_NO_QUORUM_ROUNDS]
        if len(shut_out) == _SHUT_OUT_ROUNDS and not any(each.participants for each in shut_out):
            yield "shut-out", f"no device was counted in the last {_SHUT_OUT_ROUNDS} rounds"
        elif len(no_quorum) == _NO_QUORUM_ROUNDS and all(r.next_version is None for r in no_quorum):
            counted = ", ".join(str(each.participants) for each in no_quorum)
            yield (
                "no-quorum",
                f"the last {_NO_QUORUM_ROUNDS} rounds made no version: {counted} updates with "
                f"those carried over, of {self.store.log.devices(self.version)} devices, and "
                f"round.quorum is {self.settings.quorum if self.settings else 1}",
            )
        if self.outcomes:
            newest = [each for each in self.outcomes if each.round == self.outcomes[0].round]
            told = sum(each.devices for each in newest)
            failed = sum(each.devices for each in newest if each.outcome == "failed")
            if failed >= max(_FEWEST_FAILED, told / 2):
                yield (
                    "devices-fail",
                    f"{failed} of {told} devices failed in round {newest[0].round}",
                )
        since = 0 if self.evaluated is None else self.evaluated.version
        if (rules := self.evaluation) is not None and self.version - since >= max(
            _UNEVALUATED_VERSIONS, 3 * rules.every_rounds
        ):
            yield (
                "unevaluated",
                f"no version has a figure since {since or 'the first'}, and it is at "
                f"{self.version}: a figure is of {rules.least_devices} devices or more "
                "(evaluation.least_devices)",
            )
        if self.rollback.version is None and self.rollback.dropped is not None:
            yield "rollback-dropped", printable(self.rollback.dropped)

    @property
    def _lacks_devices(self) -> bool:
        """Whether no round opens because there are too few."""
        waits = self.open_round is None and self.row.state == "active"
        return waits and self.eligible < (self.wait_for_devices or 0)

    @property
    def standing(self) -> TaskStanding:
        """How it is doing."""
        codes, row = {each.code for each in self.problems}, self.open_round
        rests = row is not None and not row.threshold
        for is_so, standing in (
            (self.row.state in ("retiring", "retired"), TaskStanding.RETIRING),
            (self.store.facts.label is None, TaskStanding.NOT_SERVED),
            ("round-held" in codes, TaskStanding.HELD),
            (
                "no-room" in codes or (not self._latest and "task-refused" in codes),
                TaskStanding.REFUSED,
            ),
            (self.row.state == "paused", TaskStanding.PAUSED),
            (bool(codes & {"too-few-devices", "no-device-fits"}), TaskStanding.WAITING),
            (rests or self.store.facts.stopped_at is not None, TaskStanding.FINISHED),
            (bool(codes & {"shut-out", "no-quorum"}), TaskStanding.STALLED),
        ):
            if is_so:
                return standing
        return TaskStanding.LEARNING


# The fleet.

_SILENT_SECONDS = 10.0
"""A worker says each second that it lives."""
LEAST_FREE_BYTES = 256 << 20
_LEAK_SHOWN_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """A cluster's worker, which was silent for so many seconds."""

    row: WorkerRow
    silent_seconds: float

    @property
    def is_silent(self) -> bool:
        """Whether it says no longer that it lives."""
        return self.silent_seconds >= _SILENT_SECONDS

    @property
    def problem(self) -> str:
        """In words; empty where it is well."""
        if self.is_silent:
            return f"silent for {span(self.silent_seconds)}"
        return "" if self.row.connected else "no connection to its broker"


class FleetHealth:
    """A fleet at one moment, as its home and store have it; as long as the store is open.

    ``now``: Unix seconds. ``tasks``: of these alone. ``most_rounds``: of each, as many are shown.
    """

    def __init__(
        self,
        home: AggregatorHome,
        store: Store,
        now: float,
        tasks: Iterable[TaskRow] | None = None,
        most_rounds: int = 10,
    ) -> None:
        self.home, self.store, self.now = home, store, now
        self.reach = read_reach(home.live_file)
        self.devices = list(store.devices.all())
        """All that ever enrolled, those revoked too."""
        self.serves = self.reach is not None or is_served(home) or store.lease.is_held()
        """Whether a serve runs, here or elsewhere."""
        registry = Registry(store.devices, self.devices)
        self.tasks = [
            TaskHealth(home, store, row, registry, now, most_rounds)
            for row in (store.tasks.all() if tasks is None else tasks)
        ]

    @property
    def active(self) -> int:
        """Devices that are enrolled and not revoked."""
        return sum(1 for row in self.devices if row.revoked_unix_seconds is None)

    @cached_property
    def workers(self) -> list[WorkerHealth]:
        """Of a cluster."""
        now = self.store.database.now()
        return [
            WorkerHealth(each, now - each.heartbeat_unix_seconds)
            for each in self.store.workers.all()
        ]

    @property
    def works_alone(self) -> bool:
        """Whether a cluster's workers go on without a coordinator."""
        live = any(not each.is_silent for each in self.workers)
        return live and self.store.lease.find() is not None and not self.store.lease.is_held()

    @cached_property
    def own_problems(self) -> list[FleetProblem]:
        """Those of the fleet that stand now."""
        return [FleetProblem(*each) for each in self._problems()] + [*self._device_problems()]

    @property
    def problems(self) -> list[FleetProblem]:
        """The fleet's, then each task's."""
        return self.own_problems + [each for task in self.tasks for each in task.problems]

    @property
    def is_ready(self) -> bool:
        """Whether nothing that the fleet is for fails to happen."""
        return all(each.severity is not Severity.ERROR for each in self.problems)

    def _problems(self) -> Iterator[tuple[str, str]]:
        facts = self.store.facts
        if self.works_alone:
            yield "no-coordinator", "nobody coordinates the cluster's workers"
        elif not self.serves:
            yield "serve-stopped", "serve does not run: no round opens or closes"
        if self.reach is not None:
            yield from reach_problems(self.reach, self.now)
        for worker in self.workers if self.serves or self.works_alone else ():
            if worker.problem:
                yield "worker-away", f"worker {worker.row.slot} of the cluster: {worker.problem}"
        free = shutil.disk_usage(self.home.folder).free
        if free < LEAST_FREE_BYTES:
            yield "disk-full", f"{size(free)} are free at {printable(str(self.home.folder))}"
        if self.serves and facts.clock_problem:
            yield "clock", printable(facts.clock_problem)
        if facts.keys_problem:
            yield "keys", printable(facts.keys_problem)
        if facts.mirror_problem:
            yield (
                "chunk-store",
                f"cluster.chunk_store cannot be written to ({printable(facts.mirror_problem)})",
            )

    def _device_problems(self) -> Iterator[FleetProblem]:
        """One of a kind, however many devices it is about."""
        by_state: dict[DeviceState, list[DeviceRow]] = {each: [] for each in DeviceState}
        for row in self.devices:
            by_state[self.state_of(row)].append(row)
        if copied := by_state[DeviceState.ON_TWO_MACHINES]:
            of = f"each of {len(copied)} devices, " if len(copied) > 1 else ""
            seen = ago(max(self._clashes[each.device_id] for each in copied), self.now)
            what = f"two machines have the identity of {of}{called_all(copied)} (last seen {seen})"
            yield FleetProblem.of_devices("two-machines", what, copied)
        silent = by_state[DeviceState.SILENT]
        if len(silent) > self.active / 2:
            what = f"{len(silent)} of {self.active} devices were not heard of for a day"
            yield FleetProblem.of_devices("devices-silent", what, silent)
        leaked = [
            each
            for each in self.store.tokens.tried_by_strangers()
            if self.now < each.expires_unix_seconds + _LEAK_SHOWN_SECONDS
        ]
        if leaked:
            used_by = {each.device_id for each in leaked}
            owners = [each for each in self.devices if each.device_id in used_by]
            times = sum(each.strangers for each in leaked)
            stranger = (leaked[-1].last_stranger or b"").hex()[:16]
            names = called_all(owners) or "nobody"
            codes = f"the code of {names} was"
            if len(leaked) > 1:
                codes = f"{len(leaked)} codes, of {names}, were"
            what = f"{codes} tried {times} times by another key, last by {stranger}..."
            yield FleetProblem.of_devices("code-leaked", what, owners)

    def state_of(self, row: DeviceRow) -> DeviceState:
        """How a device is doing."""
        seen, clash = self._seen.get(row.device_id), self._clashes.get(row.device_id)
        return state_of(row, seen, clash, self.now)

    @cached_property
    def _seen(self) -> dict[bytes, int]:
        return self.store.devices.seen()

    @cached_property
    def _clashes(self) -> dict[bytes, int]:
        return self.store.devices.clashes()


def reach_problems(reach: Reach, now: float) -> Iterator[tuple[str, str]]:
    """What a serve that runs does not reach; for these no store is needed."""
    if reach.store_problem:
        since = span(max(0.0, now - reach.store_since_unix_seconds))
        yield (
            "store-away",
            f"serve waits for its store for {since}: {printable(reach.store_problem)}",
        )
    if reach.broker and not reach.connected:
        why = f": {reach.broker_problem}" if reach.broker_problem else ""
        yield "broker-away", printable(f"serve {reach.words(now)}{why}")
    if reach.refused_topics:
        topics = ", ".join(map(printable, reach.refused_topics))
        yield "topics-refused", f"the broker refuses the subscription to {topics}"
    if reach.console_problem:
        yield "console-away", f"the console does not answer ({printable(reach.console_problem)})"
    if reach.broker_losses:
        yield (
            "broker-drops",
            f"the broker acknowledged {reach.broker_losses} test messages and did not deliver them",
        )


# Asked again and again, beside a fleet that is served.

_SHARE = 0.01
_LEAST_SECONDS = 1.0
_WAIT_SECONDS = 1.0
_FIRST_WAIT_SECONDS = 5.0
"""Prometheus waits ten seconds."""
_HANGS_SECONDS = 30.0


class ProblemWatch:
    """The problems of a home, looked for anew when that costs no more than a hundredth of a
    processor, whoever asks how often, from any thread.

    One thread looks, whom nobody waits for longer than a moment: then what was found last is told.
    ``clock``: monotonic seconds; ``unix_clock``: Unix seconds; ``work_clock``: processor seconds of
    the thread that asks it.
    """

    def __init__(
        self,
        home: AggregatorHome,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._home, self._clock, self._unix_clock = home, clock, unix_clock
        self._work_clock = work_clock
        self._next_seconds = clock()
        self._last: tuple[FleetProblem, ...] | None = None
        self._began: float | None = None
        """When the look began that goes on."""
        self._changed = Condition()

    def __call__(self) -> tuple[FleetProblem, ...]:
        with self._changed:
            if self._began is None and self._clock() >= self._next_seconds:
                self._began = self._clock()
                try:
                    Thread(target=self._run, name="problem watch", daemon=True).start()
                except BaseException:
                    self._began = None
                    raise
            wait_seconds = _FIRST_WAIT_SECONDS if self._last is None else _WAIT_SECONDS
            self._changed.wait_for(lambda: self._began is None, wait_seconds)
            last, began = self._last, self._began
        if last is not None and (began is None or self._clock() - began < _HANGS_SECONDS):
            return last
        slow = FleetProblem("store-away", "the store takes long to tell how the fleet does")
        return (slow, *(each for each in last or () if each.code != slow.code))

    def _run(self) -> None:
        before = self._work_clock()
        found = self._look()
        took = self._work_clock() - before  # to wait for a store is no work
        with self._changed:
            self._next_seconds = self._clock() + max(_LEAST_SECONDS, took / _SHARE)
            self._last, self._began = found, None
            self._changed.notify_all()

    def _look(self) -> tuple[FleetProblem, ...]:
        """Whatever fails in it is a problem, too."""
        reached: tuple[FleetProblem, ...] = ()
        try:
            now, reach = self._unix_clock(), read_reach(self._home.live_file)
            if reach is not None:
                reached = tuple(FleetProblem(*each) for each in reach_problems(reach, now))
                if reach.store_problem:  # it would be waited for here, too
                    return reached
            store = self._home.open_store()
            try:
                return tuple(FleetHealth(self._home, store, now, most_rounds=1).problems)
            finally:
                with suppress(Exception):  # all has been read
                    store.database.close()
        except (AggregatorError, *STORE_FAILURES) as error:
            return (*reached, FleetProblem("store-away", printable(str(error))))
        except Exception as error:
            what = f"how the fleet does cannot be found out: {in_words(error)}"
            unread = FleetProblem("health-unread", printable(what))
            if unread not in (self._last or ()):
                LogEvent.METRICS_FAIL.log(error)
            return (*reached, unread)
