"""What a device says about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from device_sdk.evaluation.metrics import METRICS
from device_sdk.evaluation.report import EvaluationReport
from device_sdk.home.task_store import KnownTask
from device_sdk.world import DeviceWorld


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A snapshot. What needs a running device (``running`` True) is empty or False otherwise.

    Attributes:
        device_id: hexadecimal.
        broker: without user and password.
        connected, session: whether broker and aggregator are reached now.
        round: the newest round concluded here; ``outcome`` and ``detail`` say how.
        trained_round: the newest round trained in.
        version: of the model that is here, from which recommendations come.
        k: columns trained in that round; with models on arrays the place of the trained one among
            those that the task offers, 1 for the smallest.
        artifact: name of the model trained in that round; empty where there is nothing to choose.
        train_seconds: how long that training took, emulated slowness included.
        k_reason: how k, or the model, was chosen; empty where it was given.
        step_p90_seconds: a round's training as measured then, 90th percentile.
        receipted_round, verdict, reason: of the newest round whose update has its receipt.
        evaluated_round, evaluated_version: of the newest evaluation on data held back here.
        evaluation: its figures, by stage (``global``: the model received; ``personal``: this
            device's own), then by metric; ``samples`` or ``users`` says of how many. None for a
            figure that the data do not define.
        evaluation_detail: why something of it is missing.
        outbox, outbox_bytes: updates without a receipt.
        working_on: the task's round being fetched or trained; None for none.
        users, interactions: local data, of all tasks.
        items: the task's recorded items, each once, when a round looked at them last;
            ``unknown_items`` of them were not in its catalogue. None before, and for a task without
            a catalogue.
        time_unix_seconds: the aggregator's time; without a session the largest that was signed.
        slowdown: above 1 the device pretends to be so many times slower.
        sent_bytes: of updates since the start, sealed.
        refused: bad messages since the start, by reason.
        left: whether this device has left its fleet.
        problem: the last thing that went wrong, with the device or with the task, and has not come
            right since.
    """

    device_id: str
    task: str
    broker: str
    running: bool
    connected: bool
    session: bool
    round: int | None
    outcome: str
    detail: str
    trained_round: int | None
    version: int | None
    k: int | None
    artifact: str
    train_seconds: float | None
    k_reason: str
    step_p90_seconds: float | None
    receipted_round: int | None
    verdict: str
    reason: str
    evaluated_round: int | None
    evaluated_version: int | None
    evaluation: Mapping[str, Mapping[str, float | None]]
    evaluation_detail: str
    outbox: int
    outbox_bytes: int
    working_on: int | None
    users: int
    interactions: int
    time_unix_seconds: int
    slowdown: float
    sent_bytes: int
    refused: Mapping[str, int]
    problem: str
    left: bool = False
    items: int | None = None
    unknown_items: int | None = None


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task as this device has it.

    Attributes:
        method: empty before the terms of a round were read.
        takes_part: whether it trains in the rounds that select it, as far as the home tells.
        why_not: for people; empty where it takes part.
        round, outcome: of the newest round concluded here; None and empty for none.
        version: of the model that is here; None for none.
        working_on: the round being fetched or trained, of a running device; None for none.
    """

    name: str
    cohort: str
    method: str
    takes_part: bool
    why_not: str
    round: int | None
    outcome: str
    version: int | None
    working_on: int | None = None


_NOT_SERVED = "the aggregator does not serve it, or not to a device with these labels"


def read_tasks(world: DeviceWorld, left_out: Mapping[str, str]) -> tuple[TaskStatus, ...]:
    """All that the home has heard of, by their names. ``left_out``: of those that are served what
    whoever runs the device takes no part in, and why."""
    home = world.home
    now = home.membership.load()
    gone = "this device has left its fleet" if now is not None and now.has_left else ""
    found = []
    for row in _known(world):
        why_not = gone or ("" if row.served else _NOT_SERVED) or left_out.get(row.name, "")
        last, model = home.rounds.last(row.name), home.models.model_mark(row.name)
        found.append(
            TaskStatus(
                name=row.name,
                cohort=row.cohort,
                method=row.method,
                takes_part=not why_not,
                why_not=why_not,
                round=None if last is None else last.round,
                outcome="" if last is None else last.outcome.value,
                version=None if model is None else model[2],
            )
        )
    return tuple(found)


def _known(world: DeviceWorld) -> list[KnownTask]:
    own = world.membership
    return world.home.tasks.all() or [KnownTask(own.task, own.cohort, served=True)]


def left_out(world: DeviceWorld) -> dict[str, str]:
    """The tasks that are served and not taken part in by this process, or another one where it
    only reads the home, and why, as far as it knows."""
    reasons = {row.name: _reason_against(world, row) for row in _known(world) if row.served}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason_against(world: DeviceWorld, row: KnownTask) -> str:
    wishes = world.wishes()
    if wishes is not None and row.name not in wishes:
        if world.tasks:
            return f"not among the tasks chosen: {', '.join(world.tasks)}"
        return (
            f"this device was enrolled for {world.membership.task} alone: Device.open(tasks=...), "
            "or data under this task's name"
        )
    # Whoever only reads the home does not know what the app gives.
    return "" if world.home.read_only else world.lacks(row.name)


def read_status(world: DeviceWorld) -> DeviceStatus:
    """What the home folder holds, as of a device that does not run."""
    home, membership = world.home, world.membership
    rounds = home.rounds
    task = membership.task
    last, trained = rounds.last(task), rounds.last(task, trained=True)
    receipted = rounds.last_receipted(task)
    model = home.models.model_mark(membership.task)
    capability = home.models.capability(membership.task)
    evaluated = rounds.evaluation(membership.task)
    users, interactions = home.interactions.counts()
    items = rounds.item_count(task)
    outbox, outbox_bytes = rounds.outbox_size()
    now = home.membership.load()
    left = now is not None and now.has_left
    verdict = receipted.verdict if receipted is not None else None
    return DeviceStatus(
        device_id=membership.grant.device_id.hex(),
        task=membership.task,
        broker=str(membership.way if now is None else now.broker(now.first_place)),
        running=False,
        connected=False,
        session=False,
        round=None if last is None else last.round,
        outcome="" if last is None else last.outcome.value,
        detail="" if last is None else last.detail,
        trained_round=None if trained is None else trained.round,
        version=None if model is None else model[2],
        k=None if trained is None else trained.k,
        artifact="" if trained is None else trained.artifact,
        train_seconds=None if trained is None else trained.train_seconds,
        k_reason="" if capability is None else capability.reason,
        step_p90_seconds=None if capability is None else capability.p90_seconds,
        receipted_round=None if receipted is None else receipted.round,
        verdict="" if verdict is None else verdict.value,
        reason="" if receipted is None else receipted.reason,
        evaluated_round=None if evaluated is None else evaluated.round,
        evaluated_version=None if evaluated is None else evaluated.version,
        evaluation={} if evaluated is None else _figures(evaluated.report),
        evaluation_detail="" if evaluated is None else evaluated.detail,
        outbox=outbox,
        outbox_bytes=outbox_bytes,
        working_on=None,
        users=users,
        interactions=interactions,
        time_unix_seconds=home.membership.signed_time(),
        slowdown=world.options.slowdown,
        sent_bytes=0,
        refused={},
        problem="",
        left=left,
        items=None if items is None else items.recorded,
        unknown_items=None if items is None else items.unknown,
    )


def _figures(report: EvaluationReport) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for each in report.results:
        stage = found.setdefault(each.stage, {})
        stage[each.metric] = None if math.isnan(each.value) else each.value
        stage[METRICS[each.metric].weighs] = each.samples
    return found
