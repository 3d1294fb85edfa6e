"""Now: how the fleet does, what its tasks do, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.operate.fleet import Fleet
from aggregator.operate.health import TaskHealth
from aggregator.operate.problems import FleetProblem
from device_sdk.system.printable import printable


@dataclass(frozen=True, slots=True)
class ShownRound:
    """The round that a task has open. ``closes``, ``because``: in words."""

    number: int
    counted: int
    expected: int
    quorum: int
    told: tuple[str, ...]
    held: bool


@dataclass(frozen=True, slots=True)
class TaskNow:
    """A task at this moment."""

    name: str
    standing: str
    paused: bool
    version: int
    eligible: int
    round: ShownRound | None
    problems: tuple[FleetProblem, ...]


@dataclass(frozen=True, slots=True)
class NowView:
    """``serve``: what the process reaches, in words; empty where none runs here."""

    serve: str
    serves: bool
    devices: int
    unused_codes: int
    problems: tuple[FleetProblem, ...]
    tasks: tuple[TaskNow, ...]
    refusals: Mapping[str, int]


def _read(fleet: Fleet, query: PageQuery) -> NowView:
    health = fleet.health(rounds=1)
    return NowView(
        serve="" if health.reach is None else printable(health.reach.words(health.now)),
        serves=health.serves,
        devices=health.active,
        unused_codes=len(fleet.unused_codes()),
        problems=tuple(health.own_problems),
        tasks=tuple(_task(each, health.store.devices.seen(), health.now) for each in health.tasks),
        refusals={printable(why): count for why, count in fleet.refusals().items()},
    )


def _task(task: TaskHealth, seen: Mapping[bytes, int], now: float) -> TaskNow:
    row, waiting = task.open_round, task.waiting
    found = None
    if row is not None and row.threshold:
        lines = () if waiting is None else tuple(waiting.lines(seen, now))
        quorum = 0 if waiting is None else waiting.quorum
        found = ShownRound(
            row.round, task.counted(row), row.expected, quorum, lines, row.held is not None
        )
    return TaskNow(
        printable(task.name),
        str(task.standing),
        task.row.state == "paused",
        task.version,
        task.eligible,
        found,
        tuple(task.problems),
    )


NOW = ConsolePage("now", "Now", _read)
