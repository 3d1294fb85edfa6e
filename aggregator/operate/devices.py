"""The devices of a fleet: who takes part and how it went on each; labelled and revoked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.lookup import task_of
from aggregator.operate.names import CLASH_SHOWN_SECONDS, ID_DIGITS, parts_of, shows_clash
from aggregator.store import Store
from aggregator.store.devices import DevicesSought
from aggregator.store.rows import DeviceRow, Habit, LastParticipation, StoredReport, TaskRow
from aggregator.task.file import served_selector
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.report import Details, ItemCount, Report
from device_sdk.wire.publish.task_messages import require_labels

_MOST_NAME_BYTES = 64
_SILENT_SECONDS = 86_400
"""Phones are charged, and plants work, once a day."""


class DeviceState(StrEnum):
    """How a device is doing, in a word. ``silent``: it was not heard of for a day."""

    ACTIVE = "active"
    SILENT = "silent"
    ON_TWO_MACHINES = "on two machines"
    REVOKED = "revoked"


def state_of(row: DeviceRow, seen: int | None, clash: int | None, now: float) -> DeviceState:
    """A device's. ``seen``, ``clash``: when it was heard of last, and showed on two machines; in
    Unix seconds as ``now``."""
    if row.revoked_unix_seconds is not None:
        return DeviceState.REVOKED
    if shows_clash(clash, now):
        return DeviceState.ON_TWO_MACHINES
    heard = row.enrolled_unix_seconds if seen is None else seen
    return DeviceState.SILENT if now - heard >= _SILENT_SECONDS else DeviceState.ACTIVE


@dataclass(frozen=True, slots=True)
class DeviceInTask:
    """What a device did last in one task; None for what it never told, or nobody can read.

    Attributes:
        round: its newest one, and how that ended there: ``outcome`` with its ``reason``.
        option: the columns, rung or artifact that it picked.
        items: how many it has recorded, and how many of these the catalogue does not know.
        counted_unix_seconds: when an update of it was counted last.
    """

    task: str | None = None
    round: int | None = None
    outcome: str | None = None
    reason: str | None = None
    told_unix_seconds: int | None = None
    option: str | None = None
    train_seconds: float | None = None
    received_bytes: int | None = None
    items: int | None = None
    unknown_items: int | None = None
    counted_unix_seconds: int | None = None

    @property
    def said(self) -> str:
        """The outcome for people, with the reason; empty where it never said."""
        if self.outcome is None:
            return ""
        said = ": ".join(filter(None, (self.outcome, self.reason)))
        if self.items is None or not self.unknown_items:
            return said
        return f"{said}, {ItemCount(self.items, self.unknown_items)}"


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """A device of the fleet.

    Attributes:
        labels: the operator's, and below them those that it gives itself.
        state: how it is doing.
        first_round: counted over all tasks, the first one that it takes part in.
        on_two_machines_unix_seconds: when it showed last that two machines have its identity.
        sdk: its version of Tessera, as it told last; and so ``runtime`` and ``platform``.
        tasks: those that it is meant for, or took part in.
    """

    device_id: str
    name: str | None
    labels: Mapping[str, str]
    state: DeviceState
    enrolled_unix_seconds: int
    first_round: int
    revoked_unix_seconds: int | None
    last_seen_unix_seconds: int | None
    on_two_machines_unix_seconds: int | None
    sdk: str | None
    runtime: str | None
    platform: str | None
    tasks: tuple[DeviceInTask, ...]

    @property
    def short_id(self) -> str:
        """The first digits of its id, by which commands know it."""
        return self.device_id[:ID_DIGITS]


@dataclass(frozen=True, slots=True)
class RevokedDevice:
    """``before``: it was revoked already."""

    device_id: str
    before: bool


@dataclass(frozen=True, slots=True)
class LabelledDevice:
    """A device as the operator calls it."""

    device_id: str
    name: str | None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DevicesFound:
    """Some devices of those that were looked for.

    Attributes:
        devices: from the ``first``-th on, of ``total``.
        states: how many there are in each state, of whichever state devices were looked for.
    """

    devices: tuple[FleetDevice, ...]
    first: int
    total: int
    states: Mapping[DeviceState, int]


def find_devices(
    home: AggregatorHome,
    store: Store,
    now: float,
    *,
    text: str,
    labels: Mapping[str, str],
    state: DeviceState | None,
    task: str | None,
    first: int,
    most: int,
) -> DevicesFound:
    """As ``Fleet`` says: what is read of the store grows with ``most``, but for one count. Raises
    AggregatorError."""
    row = None if task is None else task_of(store, task)
    wanted = DevicesSought(
        text.strip(),
        labels,
        state or "",
        None if row is None else row.number,
        {} if row is None else served_selector(row.served).only,
        # As state_of says, of whole seconds.
        clashed_after=math.floor(now) - CLASH_SHOWN_SECONDS,
        silent_until=math.floor(now) - _SILENT_SECONDS,
    )
    states = {DeviceState(each): n for each, n in store.devices.states(wanted).items()}
    total = sum(states.values()) if state is None else states.get(state, 0)
    rows = store.devices.sought(wanted, first, most)
    read = DeviceReader(home, store, now, rows=rows).read
    return DevicesFound(tuple(map(read, rows)), first, total, states)


class DeviceReader:
    """What each device did last, in all tasks, as the store has it at one moment."""

    def __init__(
        self,
        home: AggregatorHome,
        store: Store,
        now: float,
        chosen: Collection[str | None] | None = None,
        rows: Sequence[DeviceRow] | None = None,
    ) -> None:
        """``now``: Unix seconds; ``chosen``: the tasks to be told of; ``rows``: whom it may be
        asked of; None: all."""
        self._now, self._chosen = now, chosen
        ids = None if rows is None else [each.device_id for each in rows]
        self._tasks = [_TaskOfDevices(home, store, row, ids) for row in store.tasks.all()]
        self._seen, self._clashes = store.devices.seen(ids), store.devices.clashes(ids)

    def read(self, row: DeviceRow) -> FleetDevice:
        """One of them."""
        active = row.revoked_unix_seconds is None
        told = [
            task.of(row.device_id)
            for task in self._tasks
            if (active and task.selector.admits(row.labels)) or row.device_id in task.participations
        ]
        known = [(part, details) for part, details in told if details is not None]
        newest = max(known, key=lambda each: each[0].told_unix_seconds or 0, default=None)
        details = None if newest is None else newest[1]
        seen, clash = self._seen.get(row.device_id), self._clashes.get(row.device_id)
        return FleetDevice(
            row.device_id.hex(),
            row.name,
            {**(details.labels if details else {}), **row.labels},
            state_of(row, seen, clash, self._now),
            row.enrolled_unix_seconds,
            row.first_round,
            row.revoked_unix_seconds,
            seen,
            clash,
            None if details is None else details.sdk,
            None if details is None else details.runtime,
            None if details is None else details.platform,
            tuple(part for part, _ in told if self._chosen is None or part.task in self._chosen),
        )


class _TaskOfDevices:
    def __init__(
        self, home: AggregatorHome, store: Store, row: TaskRow, ids: Sequence[bytes] | None
    ) -> None:
        self.name = row.name
        self.parts = parts_of(home, store, row)
        self.selector = served_selector(row.served)
        told = store.task(row.number).participations
        self.participations = told.all() if ids is None else told.of(ids)

    def of(self, device_id: bytes) -> tuple[DeviceInTask, Details | None]:
        """What it did last, and what it told of itself with that."""
        row = self.participations.get(device_id, LastParticipation())
        report: Report | None = None
        if row.report is not None:
            with suppress(WireError):  # of a version that this one cannot read
                report = decode(Report, row.report)
        details = None if report is None else report.details
        items = None if details is None else details.items
        option = "" if details is None else details.option
        return (
            DeviceInTask(
                self.name,
                row.round,
                None if report is None else report.outcome.value,
                None if report is None else report.reason,
                row.told_unix_seconds,
                option or self.parts.trained(row.width or 0) or None,
                None if details is None else details.seconds,
                None if details is None else details.received_bytes,
                None if items is None else items.recorded,
                None if items is None else items.unknown,
                row.counted_unix_seconds,
            ),
            details,
        )


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """What a device told of one task's last rounds, the newest first, and when its updates come;
    ``habit``: None where it was never waited for."""

    task: str | None
    reports: tuple[StoredReport, ...]
    habit: Habit | None


def history_of(store: Store, row: DeviceRow) -> list[DeviceHistory]:
    """A device's, of each task that knows it."""
    found = []
    for task in store.tasks.all():
        own = store.task(task.number)
        reports = own.reports.of(row.device_id)
        habit = own.habits.of([row.device_id]).get(row.device_id)
        if reports or habit is not None:
            found.append(DeviceHistory(task.name, tuple(reports), habit))
    return found


def require_device_name(text: str) -> None:
    """Any printable text of 1 to 64 bytes. Raises AggregatorError."""
    if not 1 <= len(text.encode()) <= _MOST_NAME_BYTES or not text.isprintable():
        raise AggregatorError(
            f"{text[:70]!r} is no name: expected 1 to {_MOST_NAME_BYTES} bytes of printable text"
        )


def changed_labels(changes: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """The labels of before with these changes; an empty value takes one away. Raises
    AggregatorError for what is none, and for too many."""
    found = {**before, **changes}
    try:
        require_labels(found := {name: value for name, value in found.items() if value})
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    return found
