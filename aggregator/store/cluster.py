"""What a cluster's processes agree on: who coordinates, which worker holds a slot, what each has
summed up of a round, and which opens were granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aggregator.errors import AggregatorError
from aggregator.store.database import Table, TableOfTask
from aggregator.store.rows import LeaseRow, ShareRow, WorkerRow


class Deposed(AggregatorError):
    """Another process took this one's place: it must write nothing more, and end."""


class RoundOver(Exception):
    """The round takes no more updates: the coordinator closes it."""


# The coordinator's lease.


_MOST_SECONDS = 60.0


class Leases(Table):
    """The one row of the table ``lease``. All times are by the store's clock.

    No lease lasts a minute. One that seems to was written by another clock, before the store's was
    set back or it failed over to a machine that lies behind: it is over, or nobody would coordinate
    until that time has come. Whoever holds it renews it by the clock of now.
    """

    def find(self) -> LeaseRow | None:
        return self._find(LeaseRow, "lease")

    def is_held(self) -> bool:
        """Whether somebody coordinates at present."""
        row = self.find()
        return row is not None and self._runs(row)

    def require_free(self) -> None:
        """Raises AggregatorError while a cluster serves the fleet."""
        row = self.find()
        if row is not None and self.is_held():
            raise AggregatorError(f"a cluster serves this fleet ({row.holder}): stop it first")

    def take(self, holder: str, program: str, seconds: float) -> int | None:
        """Take it where nobody holds it: the term; None while another process does."""
        with self._database.transaction():
            row = self.find()
            if row is not None and row.holder != holder and self._runs(row):
                return None
            term = 1 if row is None else row.term + 1
            until = self._database.now() + seconds
            self._put("lease", LeaseRow(holder, term, until, program), one=1)
        return term

    def _runs(self, row: LeaseRow) -> bool:
        return 0 < row.until_unix_seconds - self._database.now() <= _MOST_SECONDS

    def renew(self, term: int, seconds: float) -> None:
        """Hold it for ``seconds`` from now. Raises Deposed."""
        with self._database.transaction():
            self.require(term)
            self._change("lease", {"until_unix": self._database.now() + seconds})

    def require(self, term: int) -> None:
        """Inside a transaction, up to whose end nobody else takes it. Raises Deposed."""
        row = self._database.hold("SELECT holder, term FROM lease", shared=True)
        if row is None or row[1] != term:
            who = "nobody" if row is None else f"{row[0]} (term {row[1]})"
            raise Deposed(f"the lease is {who}'s now: this coordinator (term {term}) ends")

    def release(self, term: int) -> None:
        """A standby need not wait. Raises Deposed."""
        self.renew(term, 0.0)

    def depose(self) -> None:
        """Whoever held it, and froze, holds it no more."""
        self._database.execute("UPDATE lease SET holder = 'nobody', term = term + 1")


# Workers, by their slots.


class Workers(Table):
    """Table ``workers``. A slot's row stays when nobody holds it: its epochs only ever rise."""

    def start(self, slot: int, cell: str, shards: str, program: str) -> int:
        """Take a slot over from whoever held it; the epoch, one above all before it."""
        with self._database.transaction():
            self._database.execute(
                "INSERT INTO workers (slot, epoch, cell, shards, program, heartbeat_unix) "
                "VALUES (?, 1, ?, ?, ?, ?) ON CONFLICT (slot) DO UPDATE SET "
                "epoch = workers.epoch + 1, cell = excluded.cell, shards = excluded.shards, "
                "program = excluded.program, heartbeat_unix = excluded.heartbeat_unix, "
                "connected = 0",
                (slot, cell, shards, program, self._database.now()),
            )
            return int(self._value("epoch", "workers", slot=slot))

    def depose(self) -> None:
        """Nobody holds a slot from now on."""
        self._database.execute("UPDATE workers SET epoch = epoch + 1")

    def require(self, slot: int, epoch: int) -> None:
        """Inside a transaction, up to whose end nobody takes the slot over. Raises Deposed."""
        row = self._database.hold("SELECT epoch FROM workers WHERE slot = ?", (slot,), shared=True)
        if row is None or row[0] != epoch:
            found = "gone" if row is None else f"held by epoch {row[0]}"
            raise Deposed(
                f"worker slot {slot} is {found}: this process (epoch {epoch}) was taken for dead, "
                "two were started for one slot, or no cluster serves the fleet any more; it ends"
            )

    def beat(self, slot: int, *, connected: bool) -> None:
        """It lives."""
        now = self._database.now()
        to = {"heartbeat_unix": now, "connected": int(connected)}
        self._change("workers", to, slot=slot)

    def all(self) -> list[WorkerRow]:
        """By slot."""
        return list(self._all(WorkerRow, "workers", "ORDER BY slot"))


# What each worker has of a round.


class Counts(NamedTuple):
    """Of an open round, over all workers: updates counted, and devices heard of."""

    counted: int
    heard: int


class Shares(TableOfTask):
    """A task's rows of the table ``shares``."""

    def put(self, row: ShareRow) -> None:
        """In the place of the slot's row of this round; inside a transaction."""
        self._put("shares", row)

    def find(self, round_number: int, slot: int) -> ShareRow | None:
        return self._find(ShareRow, "shares", round=round_number, slot=slot)

    def sums(self) -> list[ShareRow]:
        """All that have a state and are part of no version yet, by round and slot; without it."""
        query = (
            "SELECT round, slot, epoch, commits, counted, heard, NULL FROM shares "
            "WHERE task = ? AND state IS NOT NULL ORDER BY round, slot"
        )
        return [ShareRow(*row) for row in self._database.rows(query, (self._task,))]

    def state(self, row: ShareRow) -> bytes:
        """What one of :meth:`sums` has."""
        return bytes(self._value("state", "shares", round=row.round, slot=row.slot))

    def counts(self, round_number: int) -> Counts:
        row = self._database.row(
            "SELECT coalesce(sum(counted), 0), coalesce(sum(heard), 0) FROM shares "
            "WHERE task = ? AND round = ?",
            (self._task, round_number),
        )
        return Counts(0, 0) if row is None else Counts(int(row[0]), int(row[1]))

    def summed(self) -> int:
        """Updates that are in sums, and in no version yet."""
        return int(self._value("sum(counted)", "shares", "AND state IS NOT NULL") or 0)

    def clear(self) -> None:
        """They are part of a version."""
        self._delete("shares")


# Counters of the opens that were granted in this life, whichever worker did.

_COUNTER_BYTES = 8


class GrantedCounters(Table):
    """Table ``freshness``: counters as 8 bytes, most significant first."""

    def of(self, sender: bytes) -> int:
        """The highest that was granted to a sender; 0 for none."""
        return int.from_bytes(self._value("counter", "freshness", sender=sender) or b"", "big")

    def of_each(self, senders: Sequence[bytes]) -> dict[bytes, int]:
        """The highest that was granted to each; those without one are left out."""
        query = "SELECT sender, counter FROM freshness WHERE sender"
        found = self._database.rows_in(query, senders)
        return {sender: int.from_bytes(counter, "big") for sender, counter in found}

    def grant(self, counters: Mapping[bytes, int]) -> set[bytes]:
        """Raise them, in a transaction; those senders whose counter was not above theirs."""
        return {
            sender
            for sender, counter in counters.items()
            if not self._database.execute(
                "INSERT INTO freshness VALUES (?, ?) ON CONFLICT (sender) DO UPDATE "
                "SET counter = excluded.counter WHERE freshness.counter < excluded.counter",
                (sender, counter.to_bytes(_COUNTER_BYTES, "big")),
            )
        }

    def forget(self, senders: Iterable[bytes]) -> None:
        """These are gone for good."""
        self._database.execute_many(
            "DELETE FROM freshness WHERE sender = ?", [(each,) for each in senders]
        )

    def clear(self) -> None:
        """Another life begins."""
        self._delete("freshness")
