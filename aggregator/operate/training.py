"""What devices train of a task, and what it takes them, as they told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.home import AggregatorHome
from aggregator.operate.names import parts_of
from aggregator.store import Store
from aggregator.store.reports import RoundCost
from aggregator.store.rows import StoredReport, TaskRow


@dataclass(frozen=True, slots=True)
class FleetTraining:
    """What a task's devices train.

    Attributes:
        parts: devices by the part of the model that they trained last, the smallest first; empty
            where all train all of it.
        costs: what the last rounds took devices, the newest first.
    """

    task: str
    parts: Mapping[str, int]
    costs: tuple[RoundCost, ...]

    @classmethod
    def read(cls, home: AggregatorHome, store: Store, row: TaskRow) -> FleetTraining:
        """Of a task."""
        own = store.task(row.number)
        parts = parts_of(home, store, row).counts(own.participations.widths())
        return cls(str(row.name), parts, tuple(own.reports.costs()))


def timed_of(store: Store, row: TaskRow, most: int) -> list[StoredReport]:
    """As ``Fleet`` says."""
    newest: dict[bytes, StoredReport] = {}
    for each in store.task(row.number).reports.trained(most):
        newest.setdefault(each.device_id, each)
    return list(newest.values())
