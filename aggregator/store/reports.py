"""What devices told of the last rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aggregator.store.database import TableOfTask
from aggregator.store.devices import STAYS
from device_sdk.wire.publish.report import Report

KEPT_ROUNDS = 10
"""Of each task; each device's newest outcome stays in ``participations.py``."""


class StoredReport(NamedTuple):
    """A tuple, as SQLite takes it. Details are None where the app keeps them to itself. What the
    device found out about the model is not among it: that is kept for less long, in
    ``evaluations.py``."""

    generation: int
    round: int
    device_id: bytes
    outcome: str
    reason: str
    sdk: str | None
    runtime: str | None
    platform: str | None
    option: str | None
    seconds: float | None
    received_bytes: int | None
    items: int | None = None
    unknown_items: int | None = None

    @classmethod
    def of(cls, generation: int, number: int, device_id: bytes, report: Report) -> StoredReport:
        """What a device told of one round."""
        told = report.details
        details: tuple[Any, ...] = (None,) * 8
        if told is not None:
            details = (told.sdk, told.runtime, told.platform, told.option, told.seconds)
            known = told.items
            details += (told.received_bytes,)
            details += (None, None) if known is None else (known.recorded, known.unknown)
        head = (generation, number, device_id, report.outcome.value, report.reason)
        return cls._make((*head, *details))


class OutcomeCount(NamedTuple):
    """How many devices told this of a round."""

    round: int
    outcome: str
    reason: str
    devices: int


class UnknownItems(NamedTuple):
    """What devices told of the items that they recorded: how many ``devices`` have some that the
    task's catalogue does not know, of how many ``told`` it; ``unknown`` of ``recorded`` items, the
    same one on several devices counted on each."""

    devices: int
    told: int
    unknown: int
    recorded: int


class NotTrained(NamedTuple):
    """Devices that told this of a round, those of the newest rounds first."""

    outcome: str
    reason: str
    device_ids: tuple[bytes, ...]


class Reports(TableOfTask):
    """A task's rows of the table ``reports``, of its last ``KEPT_ROUNDS`` rounds."""

    def add(self, reports: Sequence[StoredReport]) -> None:
        """Reports of a group; of two by one device on one round the first stays, of a device that
        was revoked none."""
        places = ", ".join(f"?{place + 1}" for place in range(len(StoredReport._fields)))
        self._database.execute_many(
            f"INSERT INTO reports SELECT {self._task}, {places} WHERE {STAYS} "
            "ON CONFLICT DO NOTHING",
            reports,
        )

    def has(self, generation: int, number: int, device_id: bytes) -> bool:
        query = (
            "SELECT 1 FROM reports "
            "WHERE task = ? AND generation = ? AND round = ? AND device_id = ?"
        )
        values = (self._task, generation, number, device_id)
        return self._database.row(query, values) is not None

    def outcomes(self) -> list[OutcomeCount]:
        """Of all rounds kept, the newest first."""
        query = (
            "SELECT round, outcome, reason, count(*) FROM reports WHERE task = ? "
            "GROUP BY generation, round, outcome, reason "
            "ORDER BY round DESC, count(*) DESC, outcome, reason"
        )
        return [OutcomeCount(*row) for row in self._database.rows(query, (self._task,))]

    def reasons(self, generation: int, number: int) -> dict[str, int]:
        """How many devices trained no update in a round, by reason."""
        query = (
            "SELECT reason, count(*) FROM reports WHERE task = ? AND generation = ? AND round = ? "
            "AND reason != '' GROUP BY reason"
        )
        return dict(self._database.rows(query, (self._task, generation, number)))

    def unknown_items(self) -> UnknownItems:
        """By the newest of the reports kept of each device."""
        query = (
            "SELECT coalesce(sum(CASE WHEN unknown_items > 0 THEN 1 ELSE 0 END), 0), count(*), "
            "coalesce(sum(unknown_items), 0), coalesce(sum(items), 0) FROM reports AS own "
            "WHERE task = ? AND items IS NOT NULL AND NOT EXISTS (SELECT 1 FROM reports AS later "
            "WHERE later.task = own.task AND later.device_id = own.device_id "
            "AND later.round > own.round AND later.items IS NOT NULL)"
        )
        row = self._database.row(query, (self._task,))
        assert row is not None  # sums of nothing are one row too
        return UnknownItems(*map(int, row))

    def not_trained(self) -> list[NotTrained]:
        """Who trained in one of the rounds kept no update, and why."""
        query = (
            "SELECT outcome, reason, device_id FROM reports WHERE task = ? AND reason != '' "
            "GROUP BY outcome, reason, device_id ORDER BY max(round) DESC, device_id"
        )
        found: dict[tuple[str, str], list[bytes]] = {}
        for outcome, reason, device_id in self._database.rows(query, (self._task,)):
            found.setdefault((outcome, reason), []).append(device_id)
        return [NotTrained(*why, tuple(ids)) for why, ids in found.items()]

    def keep_last(self, newest: int) -> None:
        """Forget all but the last rounds, of which ``newest`` is the newest."""
        self._database.execute(
            "DELETE FROM reports WHERE task = ? AND round <= ?", (self._task, newest - KEPT_ROUNDS)
        )
