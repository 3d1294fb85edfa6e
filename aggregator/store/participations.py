"""What each device did last in each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aggregator.store.database import TableOfTask


class LastParticipation(NamedTuple):
    """A device's newest update that was counted, and what it told of its newest round.

    Attributes:
        counted_unix_seconds: when the update was counted; None: none was.
        width: the columns that it had, if any.
        told_unix_seconds, round: when the device told how which round ended; None: it never did.
        report: what it told, without evaluation; None, too, once it is revoked.
    """

    counted_unix_seconds: int | None = None
    width: int | None = None
    told_unix_seconds: int | None = None
    round: int | None = None
    report: bytes | None = None


_TOLD = ", ".join(
    f"{name} = CASE WHEN excluded.round >= coalesce(participations.round, 0) "
    f"THEN excluded.{name} ELSE participations.{name} END"
    for name in ("told_unix", "round", "report")
)


class Participations(TableOfTask):
    """A task's rows of the table ``participations``."""

    def all(self) -> dict[bytes, LastParticipation]:
        """By the device's id."""
        query = (
            "SELECT device_id, counted_unix, width, told_unix, round, report "
            "FROM participations WHERE task = ?"
        )
        rows = self._database.rows(query, (self._task,))
        return {device_id: LastParticipation(*rest) for device_id, *rest in rows}

    def note(self, seen: Mapping[bytes, LastParticipation]) -> None:
        """What devices did, by their ids, beside what is known of them: of each the newer update
        and the newer round."""
        # One statement for both: two take twice the time, and each update comes by here.
        self._database.execute_many(
            f"INSERT INTO participations VALUES ({self._task}, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (task, device_id) DO UPDATE SET counted_unix = "
            "coalesce(excluded.counted_unix, participations.counted_unix), width = CASE WHEN "
            "excluded.counted_unix IS NULL THEN participations.width ELSE excluded.width END, "
            f"{_TOLD}",
            [(device_id, *seen[device_id]) for device_id in sorted(seen)],
        )
