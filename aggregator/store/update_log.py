"""Accepted updates that are not part of a version yet, and the verdict on every update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aggregator.store.database import TableOfTask


class LoggedUpdate(NamedTuple):
    """An accepted update. ``seq`` gives the order of commits, which is the order of absorption.

    A tuple, as SQLite takes it: a fleet's updates are too many to be written out twice.
    """

    seq: int
    round: int
    device_id: bytes
    arrived_seconds: float
    body: bytes


_BODIES_AT_ONCE = 64  # of two megabytes each, they still fit into memory
NOTED = "noted"
"""In the place of a reason: a contribution without an update, whose report was taken."""


class StoredVerdict(NamedTuple):
    """What was decided on a body: counted (``reason`` None), ``NOTED``, or refused; and when it
    came, in seconds after the round opened."""

    generation: int
    round: int
    device_id: bytes
    body_sha256: bytes
    reason: str | None
    seconds: float = 0.0


class UpdateLog(TableOfTask):
    """A task's rows of the tables ``updates`` and ``verdicts``.

    Their statements name the task's number themselves: rows need not be written out again.
    """

    def append(self, updates: Sequence[LoggedUpdate], verdicts: Sequence[StoredVerdict]) -> None:
        """A group of updates; inside a transaction."""
        self._database.execute_many(
            "INSERT INTO updates (task, seq, round, device_id, arrived_seconds, body) "
            f"VALUES ({self._task}, ?, ?, ?, ?, ?)",
            updates,
        )
        self._database.execute_many(
            "INSERT INTO verdicts (task, generation, round, device_id, body_sha256, reason, "
            f"seconds) VALUES ({self._task}, ?, ?, ?, ?, ?, ?)",
            verdicts,
        )

    def verdict(self, generation: int, round_number: int, device_id: bytes) -> StoredVerdict | None:
        row = self._database.row(
            "SELECT generation, round, device_id, body_sha256, reason, seconds FROM verdicts "
            "WHERE task = ? AND generation = ? AND round = ? AND device_id = ?",
            (self._task, generation, round_number, device_id),
        )
        return None if row is None else StoredVerdict(*row)

    def judged(self, generation: int, round_number: int) -> Iterator[bytes]:
        query = "SELECT device_id FROM verdicts WHERE task = ? AND generation = ? AND round = ?"
        for row in self._database.rows(query, (self._task, generation, round_number)):
            yield row[0]

    def heard(self, generation: int, round_number: int) -> int:
        """How many devices had a verdict."""
        row = self._database.row(
            "SELECT count(*) FROM verdicts WHERE task = ? AND generation = ? AND round = ?",
            (self._task, generation, round_number),
        )
        return 0 if row is None else int(row[0])

    def came(
        self, generation: int, round_number: int, device_ids: Sequence[bytes] | None = None
    ) -> Iterator[tuple[bytes, float | None]]:
        """The devices (of these, where they are named) that have a verdict in a round, with the
        seconds after its opening at which an update came that was counted; None: none was."""
        query = (
            "SELECT device_id, CASE WHEN reason IS NULL THEN seconds END FROM verdicts "
            f"WHERE task = {self._task} AND generation = {generation} AND round = {round_number}"
        )
        if device_ids is None:
            yield from self._database.rows(query)
        else:
            yield from self._database.rows_in(f"{query} AND device_id", device_ids)

    def counted(self, generation: int, round_number: int) -> int:
        """How many were."""
        row = self._database.row(
            "SELECT count(*) FROM verdicts WHERE task = ? AND generation = ? AND round = ? "
            "AND reason IS NULL",
            (self._task, generation, round_number),
        )
        return 0 if row is None else int(row[0])

    def median_seconds(self, generation: int, round_number: int) -> float:
        """After the round opened, of the updates counted; 0 without any."""
        count = self.counted(generation, round_number)
        row = self._database.row(
            "SELECT avg(seconds) FROM (SELECT seconds FROM verdicts WHERE task = ? "
            "AND generation = ? AND round = ? AND reason IS NULL ORDER BY seconds "
            "LIMIT ? OFFSET ?) AS middle",
            (self._task, generation, round_number, 2 - count % 2, max(0, count - 1) // 2),
        )
        return 0.0 if row is None or row[0] is None else float(row[0])

    def after(self, seq: int) -> Iterator[LoggedUpdate]:
        """Updates to absorb, in order of their commits; quarantined ones are left out."""
        query = (
            "SELECT seq, round, device_id, arrived_seconds, body FROM updates "
            "WHERE task = ? AND seq > ? AND quarantined IS NULL ORDER BY seq LIMIT ?"
        )
        while page := list(self._database.rows(query, (self._task, seq, _BODIES_AT_ONCE))):
            for row in page:
                yield LoggedUpdate(*row)
            seq = page[-1][0]

    def by_device(self) -> Iterator[LoggedUpdate]:
        """As :meth:`after` has all of them, in an order that does not tell who took them in: by
        round and device."""
        last = (0, b"")
        query = (
            "SELECT seq, round, device_id, arrived_seconds, body FROM updates "
            "WHERE task = ?1 AND quarantined IS NULL "
            "AND (round > ?2 OR (round = ?2 AND device_id > ?3)) "
            "ORDER BY round, device_id LIMIT 256"
        )
        while True:
            found = [LoggedUpdate(*row) for row in self._database.rows(query, (self._task, *last))]
            yield from found
            if not found:
                return
            last = (found[-1].round, found[-1].device_id)

    def waiting(self) -> int:
        """Updates to absorb."""
        query = "SELECT count(*) FROM updates WHERE task = ? AND quarantined IS NULL"
        row = self._database.row(query, (self._task,))
        return 0 if row is None else int(row[0])

    def last_seq(self) -> int:
        """The highest number in the log; 0 when it is empty."""
        query = "SELECT coalesce(max(seq), 0) FROM updates WHERE task = ?"
        row = self._database.row(query, (self._task,))
        return 0 if row is None else int(row[0])

    def quarantine(self, update: LoggedUpdate, generation: int, why: str) -> None:
        """Leave an update out of every sum, and refuse it for good; its body stays for a look."""
        self._database.execute(
            "UPDATE updates SET quarantined = ? WHERE task = ? AND seq = ?",
            (why, self._task, update.seq),
        )
        self._database.execute(
            "UPDATE verdicts SET reason = 'quarantined' "
            "WHERE task = ? AND generation = ? AND round = ? AND device_id = ?",
            (self._task, generation, update.round, update.device_id),
        )

    def quarantined(self) -> list[tuple[int, bytes, str]]:
        """(round, device id, why) of updates in quarantine."""
        query = (
            "SELECT round, device_id, quarantined FROM updates "
            "WHERE task = ? AND quarantined IS NOT NULL"
        )
        return [(row[0], row[1], row[2]) for row in self._database.rows(query, (self._task,))]

    def drop_quarantined(self) -> int:
        """Delete the bodies in quarantine; their number."""
        return self._database.execute(
            "DELETE FROM updates WHERE task = ? AND quarantined IS NOT NULL", (self._task,)
        )

    def clear(self) -> None:
        """Forget the log: its updates are part of a version."""
        self._database.execute("DELETE FROM updates WHERE task = ?", (self._task,))
