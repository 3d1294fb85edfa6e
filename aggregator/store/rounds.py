"""Rounds, open and closed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.store.database import Table

_COLUMNS = (
    "round, generation, version, opened_unix, deadline_unix, seed, threshold, expected, items, "
    "closed_unix, next_version, participants, metrics, held, forgotten"
)


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. ``closed_unix_seconds`` None: open. ``next_version`` None: the quorum was missed.

    ``held``: why the round may not close before the operator looked. ``forgotten``: its verdicts
    were deleted.
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


class Rounds(Table):
    def add(self, row: RoundRow) -> None:
        self._database.execute(
            "INSERT INTO rounds (round, generation, version, opened_unix, deadline_unix, seed, "
            "threshold, expected, items) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.round,
                row.generation,
                row.version,
                row.opened_unix_seconds,
                row.deadline_unix_seconds,
                row.seed,
                row.threshold.to_bytes(8, "little"),
                row.expected,
                row.items,
            ),
        )

    def close(
        self,
        number: int,
        closed_unix_seconds: float,
        next_version: int | None,
        participants: int,
        metrics: Mapping[str, float],
        arrivals: NDArray[np.float32],
    ) -> None:
        """The round ended; ``arrivals`` in seconds after it opened."""
        self._database.execute(
            "UPDATE rounds SET closed_unix = ?, next_version = ?, participants = ?, metrics = ?, "
            "arrivals = ?, held = NULL WHERE round = ?",
            (
                closed_unix_seconds,
                next_version,
                participants,
                json.dumps(dict(metrics), sort_keys=True),
                arrivals.astype("<f4").tobytes(),
                number,
            ),
        )

    def give_up(self, number: int, closed_unix_seconds: float) -> None:
        """Close an open round without a version; its updates stay in the log."""
        self._database.execute(
            "UPDATE rounds SET closed_unix = ?, participants = 0, metrics = '{}', held = NULL "
            "WHERE round = ?",
            (closed_unix_seconds, number),
        )

    def hold(self, number: int, why: str | None) -> None:
        """Keep a round from closing, or let it go (None)."""
        self._database.execute("UPDATE rounds SET held = ? WHERE round = ?", (why, number))

    def find(self, number: int) -> RoundRow | None:
        return _row(self._database.row(f"SELECT {_COLUMNS} FROM rounds WHERE round = ?", (number,)))

    def latest(self, count: int = 1) -> list[RoundRow]:
        """The newest rounds, newest first."""
        query = f"SELECT {_COLUMNS} FROM rounds ORDER BY round DESC LIMIT ?"
        found = (_row(row) for row in self._database.rows(query, (count,)))
        return [row for row in found if row is not None]

    def arrivals(self, last_rounds: int) -> list[NDArray[np.float32]]:
        """Arrival times of the last closed rounds, newest first."""
        query = "SELECT arrivals FROM rounds WHERE arrivals IS NOT NULL ORDER BY round DESC LIMIT ?"
        return [
            np.frombuffer(row[0], dtype="<f4").astype(np.float32)
            for row in self._database.rows(query, (last_rounds,))
        ]

    def forget_verdicts(self, served_seconds: float, kept_seconds: float) -> int:
        """Drop the verdicts of rounds that closed long ago; the number of rounds.

        In one transaction with the mark that they are forgotten. ``served_seconds``: how long
        ``serve`` has run in this home, in all. A round's age is what has been served since a call
        of this method first saw it closed.
        """
        self._database.execute(
            "UPDATE rounds SET closed_served_seconds = ? WHERE forgotten = 0 "
            "AND closed_unix NOT NULL AND closed_served_seconds IS NULL",
            (served_seconds,),
        )
        query = (
            "SELECT generation, round FROM rounds WHERE forgotten = 0 "
            "AND closed_served_seconds <= ?"
        )
        old = list(self._database.rows(query, (served_seconds - kept_seconds,)))
        self._database.execute_many("DELETE FROM verdicts WHERE generation = ? AND round = ?", old)
        self._database.execute_many(
            "UPDATE rounds SET forgotten = 1, arrivals = NULL WHERE generation = ? AND round = ?",
            old,
        )
        return len(old)


def _row(values: tuple[object, ...] | None) -> RoundRow | None:
    if values is None:
        return None
    fields = list(values)
    fields[6] = int.from_bytes(bytes(fields[6]), "little")  # type: ignore[call-overload]
    fields[12] = None if fields[12] is None else json.loads(str(fields[12]))
    fields[14] = bool(fields[14])
    return RoundRow(*fields)  # type: ignore[arg-type]
