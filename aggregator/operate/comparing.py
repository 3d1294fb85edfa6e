"""Two versions of a task's model beside each other: how they came about, and how good they are."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.tasks import file_of
from aggregator.store import Store, TaskStore
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import TaskRow, VersionRow
from aggregator.task.check import flat


@dataclass(frozen=True, slots=True)
class ComparedVersion:
    """One of them. ``evaluated``: None where it has no figures."""

    row: VersionRow
    evaluated: EvaluatedVersion | None


@dataclass(frozen=True, slots=True)
class VersionComparison:
    """``settings``: in which the task files differ that they were made under, by dotted name, with
    what each says; None where it says nothing."""

    task: str
    one: ComparedVersion
    other: ComparedVersion
    settings: Mapping[str, tuple[Any, Any]]


def compare_versions(
    home: AggregatorHome, store: Store, row: TaskRow, one: int, other: int
) -> VersionComparison:
    """Two versions of a task. Raises AggregatorError for one that there never was."""
    own = store.task(row.number)
    first, second = (_compared(own, each) for each in (one, other))
    said = [dict(flat(tomllib.loads(file_of(home, store, row, each)))) for each in (one, other)]
    names = sorted({*said[0], *said[1]})
    differ = {name: (said[0].get(name), said[1].get(name)) for name in names}
    settings = {name: pair for name, pair in differ.items() if pair[0] != pair[1]}
    return VersionComparison(str(row.name), first, second, settings)


def _compared(own: TaskStore, version: int) -> ComparedVersion:
    row = own.versions.find(version)
    if row is None:
        raise AggregatorError(f"there is no version {version}, nor was there one")
    return ComparedVersion(row, own.evaluations.find(version))
