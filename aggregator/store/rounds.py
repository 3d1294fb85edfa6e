"""Rounds, open and closed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.store.database import TableOfTask

_COLUMNS = (
    "round, generation, version, opened_unix, deadline_unix, seed, threshold, expected, items, "
    "closed_unix, next_version, participants, metrics, held, forgotten, opening, "
    "took_seconds"
)


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. ``closed_unix_seconds`` None: open. ``next_version`` None: the quorum was missed.
    Closed, with ``participants`` None: nothing enters any more, and its version is being made.

    ``held``: why the round may not close before the operator looked. ``forgotten``: its verdicts
    were deleted. ``opening``: the how-manieth round of any task it was to open. ``took_seconds``:
    how long it lasted, see :class:`~aggregator.rounds.round_times.RoundTimes`; None where it was
    given up, too.
    """

    round: int
    generation: int
    version: int
    opened_unix_seconds: float
    deadline_unix_seconds: float
    seed: bytes
    threshold: int
    expected: int
    items: int
    closed_unix_seconds: float | None = None
    next_version: int | None = None
    participants: int | None = None
    metrics: Mapping[str, float] | None = None
    held: str | None = None
    forgotten: bool = False
    opening: int = 0
    took_seconds: float | None = None

    @property
    def length_seconds(self) -> float:
        """How long it collects at most."""
        return self.deadline_unix_seconds - self.opened_unix_seconds

    @property
    def unfinished(self) -> bool:
        """Whether it is open, or being closed."""
        return self.participants is None


class Rounds(TableOfTask):
    """A task's rows of the table ``rounds``."""

    def add(self, row: RoundRow) -> None:
        self._database.execute(
            "INSERT INTO rounds (task, round, generation, version, opened_unix, deadline_unix, "
            "seed, threshold, expected, items, opening) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._task,
                row.round,
                row.generation,
                row.version,
                row.opened_unix_seconds,
                row.deadline_unix_seconds,
                row.seed,
                row.threshold.to_bytes(8, "little"),
                row.expected,
                row.items,
                row.opening,
            ),
        )

    def close(
        self,
        number: int,
        closed_unix_seconds: float,
        took_seconds: float,
        next_version: int | None,
        participants: int,
        metrics: Mapping[str, float],
    ) -> None:
        """The round ended."""
        self._database.execute(
            "UPDATE rounds SET closed_unix = ?, took_seconds = ?, next_version = ?, "
            "participants = ?, metrics = ?, held = NULL WHERE task = ? AND round = ?",
            (
                closed_unix_seconds,
                took_seconds,
                next_version,
                participants,
                json.dumps(dict(metrics), sort_keys=True),
                self._task,
                number,
            ),
        )

    def end_entry(self, number: int, closed_unix_seconds: float) -> None:
        """Nothing enters any more: the first half of :meth:`close`, where others take updates in.
        To be done in a transaction of its own."""
        self._database.execute(
            "UPDATE rounds SET closed_unix = ? WHERE task = ? AND round = ? "
            "AND closed_unix IS NULL",
            (closed_unix_seconds, self._task, number),
        )

    def is_open(self, number: int) -> bool:
        """Whether updates may enter; inside a transaction, up to whose end that stays so."""
        query = "SELECT closed_unix FROM rounds WHERE task = ? AND round = ?"
        row = self._database.hold(query, (self._task, number), shared=True)
        return row is not None and row[0] is None

    def give_up(self, number: int, closed_unix_seconds: float) -> None:
        """Close an open round without a version; its updates stay in the log."""
        self._database.execute(
            "UPDATE rounds SET closed_unix = ?, participants = 0, metrics = '{}', held = NULL "
            "WHERE task = ? AND round = ?",
            (closed_unix_seconds, self._task, number),
        )

    def hold(self, number: int, why: str | None) -> None:
        """Keep a round from closing, or let it go (None)."""
        self._database.execute(
            "UPDATE rounds SET held = ? WHERE task = ? AND round = ?", (why, self._task, number)
        )

    def find(self, number: int) -> RoundRow | None:
        query = f"SELECT {_COLUMNS} FROM rounds WHERE task = ? AND round = ?"
        return _row(self._database.row(query, (self._task, number)))

    def played(self, since_version: int) -> int:
        """How many rounds opened, of this version and later ones, that somebody could take part in:
        not those that rest."""
        row = self._database.row(
            "SELECT count(*) FROM rounds WHERE task = ? AND version >= ? AND threshold != ?",
            (self._task, since_version, bytes(8)),
        )
        return 0 if row is None else int(row[0])

    def latest(self, count: int = 1) -> list[RoundRow]:
        """The newest rounds, newest first."""
        query = f"SELECT {_COLUMNS} FROM rounds WHERE task = ? ORDER BY round DESC LIMIT ?"
        found = (_row(row) for row in self._database.rows(query, (self._task, count)))
        return [row for row in found if row is not None]

    def forget_verdicts(self, served_seconds: float, kept_seconds: float) -> int:
        """Drop the verdicts of rounds that closed long ago; the number of rounds.

        In one transaction with the mark that they are forgotten. ``served_seconds``: how long
        ``serve`` has run in this home, in all. A round's age is what has been served since a call
        of this method first saw it closed.
        """
        self._database.execute(
            "UPDATE rounds SET closed_served_seconds = ? WHERE task = ? AND forgotten = 0 "
            "AND closed_unix IS NOT NULL AND closed_served_seconds IS NULL",
            (served_seconds, self._task),
        )
        query = (
            "SELECT task, generation, round FROM rounds WHERE task = ? AND forgotten = 0 "
            "AND closed_served_seconds <= ?"
        )
        old = list(self._database.rows(query, (self._task, served_seconds - kept_seconds)))
        where = "WHERE task = ? AND generation = ? AND round = ?"
        self._database.execute_many(f"DELETE FROM verdicts {where}", old)
        self._database.execute_many(f"UPDATE rounds SET forgotten = 1 {where}", old)
        return len(old)


def _row(values: tuple[object, ...] | None) -> RoundRow | None:
    if values is None:
        return None
    fields = list(values)
    fields[6] = int.from_bytes(bytes(fields[6]), "little")  # type: ignore[call-overload]
    fields[12] = None if fields[12] is None else json.loads(str(fields[12]))
    fields[14] = bool(fields[14])
    return RoundRow(*fields)  # type: ignore[arg-type]
