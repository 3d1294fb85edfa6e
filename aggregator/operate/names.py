"""How operators are told of devices, tasks and parts of a model."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.errors import TaskError
from aggregator.home import AggregatorHome
from aggregator.rounds.model_parts import ModelParts
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, TaskRow
from aggregator.store.tasks import FIRST
from aggregator.store.versions import Ranking
from aggregator.task.file import Task, parse_task, read_task
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import read_manifest
from device_sdk.system.printable import printable

CLASH_SHOWN_SECONDS = 86_400
ID_DIGITS = 12
"""So many of an id name a device, or a code."""
_MOST_NAMED = 8


def short_id(row: DeviceRow) -> str:
    """The first digits of a device's id, by which commands know it."""
    return row.device_id.hex()[:ID_DIGITS]


def called(row: DeviceRow) -> str:
    """Its name, or the first digits of its id."""
    return printable(row.name) if row.name else short_id(row)


def called_all(rows: Sequence[DeviceRow]) -> str:
    """Such as "hall-1, 3f2a11c09b72 and 4 more"."""
    more = len(rows) - _MOST_NAMED
    named = ", ".join(map(called, rows[:_MOST_NAMED]))
    return f"{named} and {more} more" if more > 0 else named


def shows_clash(clash_unix_seconds: int | None, now: float) -> bool:
    """Whether two machines had one device's identity so lately that it is told."""
    return clash_unix_seconds is not None and now - clash_unix_seconds < CLASH_SHOWN_SECONDS


def task_file_of(home: AggregatorHome, store: Store, row: TaskRow) -> Task:
    """A task's file, read. Raises TaskError."""
    first = read_task(home.folder / store.tasks.find(FIRST).file)
    return first if row.number == FIRST else read_task(home.folder / row.file, first.fleet)


def served_task_of(home: AggregatorHome, store: Store, row: TaskRow) -> Task:
    """A task as it is served, or was last, whatever its file says now. Raises TaskError."""
    first = store.tasks.find(FIRST)
    fleet = None if row.number == FIRST else served_task_of(home, store, first).fleet
    return parse_task(row.served or "", home.folder / row.file, fleet)


def readable_task_of(home: AggregatorHome, store: Store, row: TaskRow) -> Task | None:
    """As :func:`task_file_of`; None where it cannot be read: what there is can be seen whatever it
    says."""
    try:
        return task_file_of(home, store, row)
    except TaskError:
        return None


def ranking_of(home: AggregatorHome, store: Store, row: TaskRow) -> Ranking | None:
    """By what a task's versions are compared; None where no readable file says so."""
    task = readable_task_of(home, store, row)
    return None if task is None else task.ranking


def parts_of(home: AggregatorHome, store: Store, row: TaskRow) -> ModelParts:
    """What the parts of a task are called, as it is served; by number where its file or artifacts
    cannot be read: what there is can be seen whatever they say."""
    try:
        task = served_task_of(home, store, row)
        return ModelParts.of([read_manifest(each) for each in task.artifacts])
    except (TaskError, ArtifactError):
        return ModelParts()
