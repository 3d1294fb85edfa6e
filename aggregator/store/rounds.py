"""Rounds, open and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aggregator.store.database import TableOfTask
from aggregator.store.rows import LoggedUpdate, RoundRow, StoredVerdict

# Accepted updates that are not part of a version yet, and the verdict on every update.


_BODIES_AT_ONCE = 64  # of two megabytes each, they still fit into memory


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
        of = {"generation": generation, "round": round_number, "device_id": device_id}
        return self._find(StoredVerdict, "verdicts", **of)

    def judged(self, generation: int, round_number: int) -> Iterator[bytes]:
        query = "SELECT device_id FROM verdicts WHERE task = ? AND generation = ? AND round = ?"
        for row in self._database.rows(query, (self._task, generation, round_number)):
            yield row[0]

    def heard_since(self, generation: int, round_number: int) -> set[bytes]:
        """The devices that had a verdict, or told how they fared, in a round or a later one."""
        where = f"task = {self._task} AND generation = {generation} AND round >= {round_number}"
        query = " UNION ".join(
            f"SELECT device_id FROM {table} WHERE {where}" for table in ("verdicts", "reports")
        )
        return {row[0] for row in self._database.rows(query)}

    def heard(self, generation: int, round_number: int) -> int:
        """How many devices had a verdict."""
        return self._count("verdicts", generation=generation, round=round_number)

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
        of = {"generation": generation, "round": round_number}
        return self._count("verdicts", "AND reason IS NULL", **of)

    def verdicts(self, generation: int, round_number: int) -> dict[str, int]:
        """How many were decided on in which way: counted under the empty reason, ``NOTED``, or
        refused."""
        query = (
            "SELECT coalesce(reason, ''), count(*) FROM verdicts WHERE task = ? "
            "AND generation = ? AND round = ? GROUP BY reason"
        )
        return dict(self._database.rows(query, (self._task, generation, round_number)))

    def counted_by_width(self, generation: int, first: int, last: int) -> dict[int, int]:
        """How many updates of these rounds were counted, by the part of the model (k, or a ladder's
        rung) that their devices trained last, rising; left out where there is none."""
        query = (
            "SELECT width, count(*) FROM verdicts JOIN participations USING (task, device_id) "
            "WHERE task = ? AND generation = ? AND verdicts.round BETWEEN ? AND ? "
            "AND verdicts.reason IS NULL AND width IS NOT NULL GROUP BY width ORDER BY width"
        )
        return dict(self._database.rows(query, (self._task, generation, first, last)))

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
        page = "AND seq > ? AND quarantined IS NULL ORDER BY seq LIMIT ?"
        while found := list(self._all(LoggedUpdate, "updates", page, seq, _BODIES_AT_ONCE)):
            yield from found
            seq = found[-1].seq

    def by_device(self) -> Iterator[LoggedUpdate]:
        """As :meth:`after` has all of them, in an order that does not tell who took them in: by
        round and device."""
        last = (0, b"")
        page = (
            "AND quarantined IS NULL AND (round, device_id) > (?, ?) "
            "ORDER BY round, device_id LIMIT 256"
        )
        while found := list(self._all(LoggedUpdate, "updates", page, *last)):
            yield from found
            last = (found[-1].round, found[-1].device_id)

    def of_other_rounds(self, number: int) -> set[bytes]:
        """The devices whose updates of other rounds than this wait to be part of a version."""
        query = "SELECT DISTINCT device_id FROM updates WHERE task = ? AND round != ?"
        return {bytes(row[0]) for row in self._database.rows(query, (self._task, number))}

    def waiting(self) -> int:
        """Updates to absorb."""
        return self._count("updates", "AND quarantined IS NULL")

    def devices(self, version: int) -> int:
        """Of how many devices the updates are that :meth:`waiting` counts, and those that a
        cluster's workers have in sums: of the rounds of ``version``, the newest. A device whose
        update was carried over may have sent more than one."""
        row = self._database.row(
            "SELECT count(*) FROM (SELECT device_id FROM updates WHERE task = ? "
            "AND quarantined IS NULL UNION SELECT device_id FROM verdicts WHERE task = ? "
            "AND (generation, round) IN (SELECT generation, round FROM rounds WHERE task = ? "
            "AND version = ?) AND reason IS NULL) AS counted",
            (self._task, self._task, self._task, version),
        )
        return 0 if row is None else int(row[0])

    def last_seq(self) -> int:
        """The highest number in the log; 0 when it is empty."""
        return int(self._value("max(seq)", "updates") or 0)

    def quarantine(self, update: LoggedUpdate, generation: int, why: str) -> None:
        """Leave an update out of every sum, and refuse it for good; its body stays for a look."""
        self._change("updates", {"quarantined": why}, seq=update.seq)
        of = {"generation": generation, "round": update.round, "device_id": update.device_id}
        self._change("verdicts", {"reason": "quarantined"}, **of)

    def quarantined(self) -> list[tuple[int, bytes, str]]:
        """(round, device id, why) of updates in quarantine."""
        query = (
            "SELECT round, device_id, quarantined FROM updates "
            "WHERE task = ? AND quarantined IS NOT NULL"
        )
        return [(row[0], row[1], row[2]) for row in self._database.rows(query, (self._task,))]

    def drop_quarantined(self) -> int:
        """Delete the bodies in quarantine; their number."""
        return self._delete("updates", "AND quarantined IS NOT NULL")

    def clear(self) -> None:
        """Forget the log: its updates are part of a version."""
        self._delete("updates")


class Rounds(TableOfTask):
    """A task's rows of the table ``rounds``."""

    def add(self, row: RoundRow) -> None:
        self._put("rounds", row, replace=False)

    def close(self, row: RoundRow) -> None:
        """The round ended, and so it did."""
        self._put("rounds", replace(row, held=None))

    def end_entry(self, number: int, closed_unix_seconds: float) -> None:
        """Nothing enters any more: the first half of :meth:`close`, where others take updates in.
        To be done in a transaction of its own."""
        to = {"closed_unix": closed_unix_seconds}
        self._change("rounds", to, "AND closed_unix IS NULL", round=number)

    def is_open(self, number: int) -> bool:
        """Whether updates may enter; inside a transaction, up to whose end that stays so."""
        query = "SELECT closed_unix FROM rounds WHERE task = ? AND round = ?"
        row = self._database.hold(query, (self._task, number), shared=True)
        return row is not None and row[0] is None

    def give_up(self, number: int, closed_unix_seconds: float) -> None:
        """Close an open round without a version; its updates stay in the log."""
        to = {"closed_unix": closed_unix_seconds, "participants": 0, "metrics": "{}", "held": None}
        self._change("rounds", to, round=number)

    def hold(self, number: int, why: str | None) -> None:
        """Keep a round from closing, or let it go (None)."""
        self._change("rounds", {"held": why}, round=number)

    def find(self, number: int) -> RoundRow | None:
        return self._find(RoundRow, "rounds", round=number)

    def played(self, since_version: int) -> int:
        """How many rounds opened, of this version and later ones, that somebody could take part in:
        not those that rest."""
        return self._count("rounds", "AND version >= ? AND threshold != ?", since_version, bytes(8))

    def made(self, first: int, end: int) -> int:
        """How many versions rounds made, from round ``first`` to before round ``end``."""
        tail = "AND round >= ? AND round < ? AND next_version > version"
        return self._count("rounds", tail, first, end)

    def of_version(self, version: int) -> list[RoundRow]:
        """The rounds that began with a version, the oldest first."""
        return list(self._all(RoundRow, "rounds", "ORDER BY round", version=version))

    def latest(self, count: int = 1) -> list[RoundRow]:
        """The newest rounds, newest first."""
        return list(self._all(RoundRow, "rounds", "ORDER BY round DESC LIMIT ?", count))

    def forget_verdicts(self, served_seconds: float, kept_seconds: float) -> int:
        """Drop the verdicts of rounds that closed long ago; the number of rounds.

        In one transaction with the mark that they are forgotten. ``served_seconds``: how long
        ``serve`` has run in this home, in all. A round's age is what has been served since a call
        of this method first saw it closed.
        """
        closed = "AND closed_unix IS NOT NULL AND closed_served_seconds IS NULL"
        self._change("rounds", {"closed_served_seconds": served_seconds}, closed, forgotten=0)
        query = (
            "SELECT task, generation, round FROM rounds WHERE task = ? AND forgotten = 0 "
            "AND closed_served_seconds <= ?"
        )
        old = list(self._database.rows(query, (self._task, served_seconds - kept_seconds)))
        where = "WHERE task = ? AND generation = ? AND round = ?"
        self._database.execute_many(f"DELETE FROM verdicts {where}", old)
        self._database.execute_many(f"UPDATE rounds SET forgotten = 1 {where}", old)
        return len(old)
