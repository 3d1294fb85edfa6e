"""Now: how the fleet does, what its tasks do, what comes in, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from aggregator.clock import moment_of
from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.errors import AggregatorError
from aggregator.operate.fleet import Fleet
from aggregator.operate.health import FleetHealth, TaskHealth
from aggregator.operate.names import called
from aggregator.operate.problems import FleetProblem
from aggregator.store.rows import NOTED, DeviceRow
from device_sdk.system.printable import printable, span

_MOST_NAMED = 12
_ROUNDS = 3
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 60.0
"""Over how long a speed is told: the newest look against the oldest of the last minute."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What had come in at one moment: updates that were counted, by task and round, and refusals by
    reason."""

    unix_seconds: float
    counted: Mapping[str, Mapping[int, int]]
    refused: Mapping[str, int]

    def since(self, before: Tally, task: str) -> int:
        """Updates of a task that were counted since."""
        known = before.counted.get(task, {})
        return sum(
            max(0, count - known.get(number, 0))
            for number, count in self.counted.get(task, {}).items()
            if number >= min(known, default=0)
        )

    def after(self, last: Tally, first: Tally) -> Tally:
        """With rounds of the ``last`` one that are shown no longer, from the ``first`` one's on."""
        counted = {}
        for task, rounds in self.counted.items():
            known = last.counted.get(task, {})
            begin = max(first.counted.get(task, {}), default=0) - _ROUNDS
            gone = {number: count for number, count in known.items() if number > begin}
            counted[task] = {**gone, **rounds}
        return replace(self, counted=counted)


@dataclass(frozen=True, slots=True)
class LinkedDevice:
    """A device, with its whole id."""

    device_id: str
    called: str

    @classmethod
    def all(cls, rows: Sequence[DeviceRow]) -> tuple[LinkedDevice, ...]:
        """The first few of them."""
        return tuple(cls(each.device_id.hex(), called(each)) for each in rows[:_MOST_NAMED])


@dataclass(frozen=True, slots=True)
class RoundNow:
    """The round that a task has open.

    Attributes:
        deadline: when it closes at the latest, in words; ``told``: what there is to say of it, each
            with a word in front.
        verdicts: what became of what came, by the reason of a refusal, each with its count.
        awaited: devices that it waits for, and how many more.
    """

    number: int
    counted: int
    expected: int
    quorum: int
    held: bool
    deadline: str
    told: tuple[tuple[str, str], ...]
    verdicts: tuple[tuple[str, int], ...]
    awaited: tuple[LinkedDevice, ...]
    more_awaited: int


@dataclass(frozen=True, slots=True)
class TaskNow:
    """A task at this moment. ``speed``: updates a second, in words; empty while nobody knows."""

    name: str
    standing: str
    paused: bool
    version: int
    eligible: int
    arrivals: str
    round: RoundNow | None
    problems: tuple[FleetProblem, ...]
    speed: str = ""


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker of a cluster. ``state``: in words."""

    slot: int
    cell: str
    shards: str
    start: int
    state: str
    is_well: bool


@dataclass(frozen=True, slots=True)
class RefusedNow:
    """``lately``: within the time that the page says; None while nobody knows."""

    reason: str
    total: int
    lately: int | None = None


@dataclass(frozen=True, slots=True)
class NowView:
    """``serve``: what the process reaches, in words; empty where none runs here.

    Attributes:
        receipts: how long updates wait for them, in words; empty where nothing is known.
        brokers: where the fleet is, or will be, and ``move``: what there is to say of a move.
        coordinator: of a cluster, in words; empty for none.
        measured: over how long, in words, what came in lately was counted; empty: not yet.
        tallies: of the last minute, the oldest first.
    """

    serve: str
    serves: bool
    receipts: str
    devices: int
    unused_codes: int
    problems: tuple[FleetProblem, ...]
    tasks: tuple[TaskNow, ...]
    brokers: tuple[str, ...]
    move: tuple[str, ...]
    coordinator: str
    workers: tuple[WorkerNow, ...]
    refusals: tuple[RefusedNow, ...]
    measured: str = ""
    tallies: tuple[Tally, ...] = field(default=(), repr=False)


def _read(fleet: Fleet, query: PageQuery) -> NowView:
    health = fleet.health(rounds=_ROUNDS)
    refused = {printable(why): count for why, count in fleet.refusals().items()}
    counted = {each.name: {r.round: each.counted(r) for r in each.rounds} for each in health.tasks}
    brokers, move = _brokers(fleet)
    coordinator, workers = _cluster(health)
    return NowView(
        serve=_reach(health),
        serves=health.serves,
        receipts="" if health.reach is None else health.reach.receipts,
        devices=health.active,
        unused_codes=len(fleet.unused_codes()),
        problems=tuple(health.own_problems),
        tasks=tuple(_task(each, health) for each in health.tasks),
        brokers=brokers,
        move=move,
        coordinator=coordinator,
        workers=workers,
        refusals=tuple(RefusedNow(why, count) for why, count in refused.items()),
        tallies=(Tally(health.now, counted, refused),),
    )


def _reach(health: FleetHealth) -> str:
    said = "" if health.reach is None else printable(health.reach.words(health.now))
    return said.removeprefix("runs").removeprefix(", ")


def _brokers(fleet: Fleet) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        found = fleet.broker()
    except AggregatorError:  # of a task file that cannot be read, which is a problem by itself
        return (), ()
    said = tuple(" ".join(each.split()) for each in found.said)
    return tuple(printable(str(each.url)) for each in found.ways), said


def _cluster(health: FleetHealth) -> tuple[str, tuple[WorkerNow, ...]]:
    lease = health.store.lease.find()
    if lease is None:
        return "", ()
    if health.store.lease.is_held():
        said = f"{printable(lease.holder)}, term {lease.term}"
    elif health.works_alone:
        said = "none: workers go on, and end after ten minutes"
    else:
        return "", ()
    workers = [
        WorkerNow(
            each.row.slot,
            printable(each.row.cell),
            printable(each.row.shards),
            each.row.epoch,
            each.problem or "connected",
            not each.problem,
        )
        for each in health.workers
    ]
    return said, tuple(workers)


def _task(task: TaskHealth, health: FleetHealth) -> TaskNow:
    late, arrivals = task.arrivals, ""
    if late is not None:
        arrivals = (
            f"half of the devices' updates came within {span(late.half)} of a round's opening, "
            f"nine tenths within {span(late.nine_tenths)}, all within {span(late.longest)}"
        )
    return TaskNow(
        printable(task.name),
        str(task.standing),
        task.row.state == "paused",
        task.version,
        task.eligible,
        arrivals,
        _round(task, health),
        tuple(task.problems),
    )


def _round(task: TaskHealth, health: FleetHealth) -> RoundNow | None:
    row, waiting = task.open_round, task.waiting
    if row is None or not row.threshold:
        return None
    lines = () if waiting is None else waiting.lines(health.store.devices.seen(), health.now)
    awaited = [] if waiting is None else waiting.awaited
    verdicts = task.store.log.verdicts(row.generation, row.round)
    left = row.deadline_unix_seconds - health.now
    return RoundNow(
        row.round,
        task.counted(row),
        row.expected,
        0 if waiting is None else waiting.quorum,
        row.held is not None,
        f"{moment_of(row.deadline_unix_seconds)}, {f'in {span(left)}' if left > 0 else 'over'}",
        tuple(_worded(each) for each in lines),
        tuple((_verdict(why), verdicts[why]) for why in sorted(verdicts)),
        LinkedDevice.all(awaited),
        max(0, len(awaited) - _MOST_NAMED),
    )


def _worded(line: str) -> tuple[str, str]:
    word, _, rest = line.partition(" ")
    return word, rest.strip()


def _verdict(reason: str) -> str:
    return {"": "counted", NOTED: "noted, without an update"}.get(
        reason, f"refused, {printable(reason)}"
    )


def _follow(before: NowView, now: NowView) -> NowView:
    """With what came in since the oldest look of the last minute."""
    (newest,) = now.tallies
    kept = [
        each
        for each in before.tallies
        if 0 <= newest.unix_seconds - each.unix_seconds <= _MOST_SECONDS
    ]
    if kept:
        newest = newest.after(kept[-1], kept[0])
    now = replace(now, tallies=(*kept, newest))
    first = now.tallies[0]
    seconds = newest.unix_seconds - first.unix_seconds
    if seconds < _LEAST_SECONDS:
        return now
    return replace(
        now,
        measured=span(seconds),
        tasks=tuple(
            replace(each, speed=f"{newest.since(first, each.name) / seconds:.1f} updates a second")
            for each in now.tasks
        ),
        refusals=tuple(
            replace(each, lately=max(0, each.total - first.refused.get(each.reason, 0)))
            for each in now.refusals
        ),
    )


NOW = ConsolePage("now", "Now", _read, follow=_follow)
