"""Rounds as a device remembers them: the newest manifest, its part in each round, the outbox."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from device_sdk.evaluation.report import EvaluationReport, read_evaluations, write_evaluations
from device_sdk.home.database import HomeStore
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.manifest import Mark, RoundManifest
from device_sdk.wire.publish.receipts import (
    Receipt,
    UpdateIdentity,
    Verdict,
    update_digest,
    with_report,
)
from device_sdk.wire.publish.report import ItemCount

_KEPT_ROUNDS = 1000
_OUTBOX = "digest, task, generation, round, body, report"


class RoundOutcome(Enum):
    """How a round ended on the device."""

    TRAINED = "trained"
    READ = "read"
    """The task rests: nobody trains, and the model was stored to recommend from."""
    NOT_SELECTED = "not-selected"
    TOO_LATE = "too-late"
    DECLINED = "declined"
    """The device cannot afford even one column in time."""
    OUTBOX_FULL = "outbox-full"
    """Too many updates wait for their receipts."""
    OVER_BUDGET = "over-budget"
    """It would take more of a day's seconds or bytes than this device's owner allows."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Participation:
    """A device's part in one round.

    ``k`` and ``train_seconds`` (emulated slowness included) are None for a round that was not
    trained, ``verdict`` until the receipt came.
    """

    task: str
    generation: int
    round: int
    version: int
    outcome: RoundOutcome
    detail: str = ""
    k: int | None = None
    train_seconds: float | None = None
    verdict: Verdict | None = None
    reason: str = ""
    artifact: str = ""
    """Name of the artifact that was trained, where the task offers several."""
    items: ItemCount | None = None
    """What was recorded for it, and is in its catalogue; None where that was not looked at."""


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An update without a receipt. With a ``report`` it is a contribution, whose ``body`` may be
    empty."""

    digest: bytes
    task: str
    generation: int
    round: int
    body: bytes
    report: bytes | None = None

    @classmethod
    def of(cls, identity: UpdateIdentity, body: bytes, report: bytes | None) -> OutboxRow:
        """The row of what is sent for a round."""
        content = body if report is None else with_report(report, body)
        digest = update_digest(identity, hashlib.sha256(content).digest())
        return cls(digest, identity.task, identity.generation, identity.round, body, report)


@dataclass(frozen=True, slots=True, eq=False)
class StoredEvaluation:
    """What was found out in a task's newest round in which this device evaluated.

    ``detail`` says why something of it is missing.
    """

    task: str
    generation: int
    round: int
    version: int
    report: EvaluationReport
    detail: str = ""


class RoundStore(HomeStore):
    """Marks, participations and outbox."""

    def mark(self, task: str, cohort: str) -> Mark | None:
        """The newest manifest accepted for a task and cohort."""
        row = self._database.row(
            "SELECT generation, round, version, sha256 FROM mark WHERE task = ? AND cohort = ?",
            task,
            cohort,
        )
        return None if row is None else Mark(*row)

    def save_mark(self, manifest: RoundManifest, mark: Mark) -> None:
        """Keep the mark of a manifest that was accepted."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO mark VALUES (?, ?, ?, ?, ?, ?)",
                (
                    manifest.task,
                    manifest.cohort,
                    mark.generation,
                    mark.round,
                    mark.version,
                    mark.sha256,
                ),
            )

    def participation(self, task: str, generation: int, round_id: int) -> Participation | None:
        """The part taken in one round; None where none was concluded."""
        found = self._participations(
            "WHERE task = ? AND generation = ? AND round = ?", task, generation, round_id
        )
        return found[0] if found else None

    def last(self, task: str | None = None, *, trained: bool = False) -> Participation | None:
        """The part taken in the newest round, or the newest that was trained; of any task, if
        None."""
        where = "WHERE (?1 IS NULL OR task = ?1)" + (" AND outcome = 'trained'" if trained else "")
        found = self._participations(f"{where} ORDER BY number DESC LIMIT 1", task)
        return found[0] if found else None

    def trained_seconds(self, task: str, generation: int) -> float | None:
        """How long the task's trainings take: the median (the lower one of two) of the newest three
        of this generation, so that one that was held up says nothing; None before the first."""
        found = self._participations(
            "WHERE task = ? AND generation = ? AND train_seconds IS NOT NULL "
            "ORDER BY number DESC LIMIT 3",
            task,
            generation,
        )
        took = sorted(part.train_seconds for part in found if part.train_seconds is not None)
        return took[(len(took) - 1) // 2] if took else None

    def item_count(self, task: str) -> ItemCount | None:
        """Of the newest round that looked at what was recorded."""
        found = self._participations(
            "WHERE task = ? AND items IS NOT NULL ORDER BY number DESC LIMIT 1", task
        )
        return found[0].items if found else None

    def newest(self) -> int:
        """A number that grows with each round concluded here; 0 before the first."""
        row = self._database.row("SELECT coalesce(max(number), 0) FROM participation")
        return 0 if row is None else int(row[0])

    def concluded_after(self, number: int) -> list[tuple[int, Participation]]:
        """The rounds concluded since :meth:`newest` was ``number``, each with its own number."""
        rows = self._database.rows(
            "SELECT number FROM participation WHERE number > ? ORDER BY number", number
        )
        found = self._participations("WHERE number > ? ORDER BY number", number)
        return [(int(row[0]), part) for row, part in zip(rows, found, strict=True)]

    def receipted(self, task: str, generation: int, most: int) -> list[Participation]:
        """The newest rounds of a task whose updates have their receipts, newest first."""
        return self._participations(
            "WHERE verdict IS NOT NULL AND task = ? AND generation = ? "
            "ORDER BY number DESC LIMIT ?",
            task,
            generation,
            most,
        )

    def last_receipted(self, task: str | None = None) -> Participation | None:
        """The newest round whose update has its receipt; of any task, if None."""
        found = self._participations(
            "WHERE verdict IS NOT NULL AND (?1 IS NULL OR task = ?1) ORDER BY number DESC LIMIT 1",
            task,
        )
        return found[0] if found else None

    def conclude(self, part: Participation) -> None:
        """Record how a round ended. Raises ``sqlite3.IntegrityError`` for a second ending."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO participation (task, generation, round, version, outcome, detail, k, "
                "train_seconds, artifact, items, unknown_items) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    part.task,
                    part.generation,
                    part.round,
                    part.version,
                    part.outcome.value,
                    part.detail[:500],
                    part.k,
                    part.train_seconds,
                    part.artifact or None,
                    None if part.items is None else part.items.recorded,
                    None if part.items is None else part.items.unknown,
                ),
            )
            sql.execute(
                "DELETE FROM participation WHERE task = ?1 AND number <= (SELECT number FROM "
                "participation WHERE task = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2) "
                "AND (outcome <> 'trained' OR verdict IS NOT NULL)",
                (part.task, _KEPT_ROUNDS),
            )

    def save_evaluation(self, found: StoredEvaluation) -> None:
        """Keep what was found out, in the place of what was before."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO evaluation VALUES (?, ?, ?, ?, ?, ?)",
                (
                    found.task,
                    found.generation,
                    found.round,
                    found.version,
                    write_evaluations(found.report),
                    found.detail[:500],
                ),
            )

    def evaluation(self, task: str) -> StoredEvaluation | None:
        """What was found out last; None for nothing yet, and for what this version cannot read."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT task, generation, round, version, report, detail FROM evaluation "
            "WHERE task = ?",
            task,
        )
        if row is None:
            return None
        try:
            return StoredEvaluation(
                row[0], row[1], row[2], row[3], read_evaluations(row[4]), row[5]
            )
        except WireError:
            return None  # to be shown, and for nothing else: no reason to refuse the home

    def post(self, row: OutboxRow) -> None:
        """Put what is to be sent for a round into the outbox, once per round."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?)",
                (row.digest, row.task, row.generation, row.round, row.body, row.report),
            )

    def outbox(self) -> list[OutboxRow]:
        """Updates without a receipt, oldest first."""
        rows = self._database.rows(f"SELECT {_OUTBOX} FROM outbox ORDER BY generation, round")
        return [OutboxRow(*row) for row in rows]

    def outbox_size(self) -> tuple[int, int]:
        """Number of updates without a receipt, and the bytes of their bodies."""
        row = self._database.row("SELECT count(*), coalesce(sum(length(body)), 0) FROM outbox")
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def settle(self, receipt: Receipt) -> OutboxRow | None:
        """Take an update out, for its receipt came; None for a receipt of nothing waiting here."""
        with self._database.transaction() as sql:
            row: tuple[Any, ...] | None = sql.execute(
                f"SELECT {_OUTBOX} FROM outbox WHERE digest = ?",
                (receipt.digest,),
            ).fetchone()
            if row is None:
                return None
            found = OutboxRow(*row)
            sql.execute("DELETE FROM outbox WHERE digest = ?", (receipt.digest,))
            if not found.body:
                return found  # of a report alone: there was no update to have a verdict
            sql.execute(
                "UPDATE participation SET verdict = ?, reason = ? "
                "WHERE task = ? AND generation = ? AND round = ?",
                (
                    receipt.verdict.value,
                    receipt.reason,
                    found.task,
                    found.generation,
                    found.round,
                ),
            )
            return found

    def _participations(self, tail: str, *values: object) -> list[Participation]:
        rows = self._database.rows(
            "SELECT task, generation, round, version, outcome, detail, k, "
            "train_seconds, verdict, reason, artifact, items, unknown_items "
            f"FROM participation {tail}",
            *values,
        )
        return [
            Participation(
                row[0],
                row[1],
                row[2],
                row[3],
                outcome=RoundOutcome(row[4]),
                detail=row[5],
                k=row[6],
                train_seconds=row[7],
                verdict=None if row[8] is None else Verdict(row[8]),
                reason=row[9] or "",
                artifact=row[10] or "",
                items=None if row[11] is None else ItemCount(row[11], row[12]),
            )
            for row in rows
        ]
