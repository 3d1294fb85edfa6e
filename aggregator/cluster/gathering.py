"""The coordinator's half of a round: what workers took in, put together when the round closes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from aggregator.errors import MethodFault
from aggregator.methods.guard import GuardedMethod
from aggregator.rounds.aggregation import Aggregation
from aggregator.store.checkpoints import unpack_state
from aggregator.store.cluster import ShareRow
from aggregator.store.rounds import RoundRow
from device_sdk.wire.codec.errors import WireError

Fetch = Callable[[int, Sequence[ShareRow]], list[bytes | None]]
"""Workers' own copies of the states that a task's rows are of: None for what none has any more."""


def from_store(task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
    """A :data:`Fetch` that asks nobody."""
    return [None] * len(rows)


class GatheredAggregation(Aggregation):
    """Absorbs nothing before the round closes: bodies then, by device, and workers' sums. The same
    updates give the same bits, whoever took them in, and in whatever order."""

    fetch: Fetch = staticmethod(from_store)

    def resume(self, open_round: RoundRow | None) -> None:
        with self._store.database.transaction():
            self._store.checkpoints.drop_partial()
        self._built = None
        self._restore(open_round)
        self.participants = self._waiting()

    def carry_over(self, row: RoundRow) -> None:
        """What rounds without quorum left waits for the end of this one, too."""
        self._restore(row)
        self.participants = self._waiting()

    def gather(self, row: RoundRow, now_unix_seconds: float) -> bool:
        """End the round's entry, once what is being committed is; then take in everything. What
        workers could not absorb holds the round."""
        with self._store.database.transaction():
            self._store.rounds.end_entry(row.round, now_unix_seconds)
            bad = self._store.log.quarantined()
            if bad:
                _, device_id, why = bad[0]
                what = f"an update of {device_id.hex()} is in quarantine: {why}"
                self._store.rounds.hold(row.round, what)
        if bad:
            return False
        self._restore(row)
        for logged in self._store.log.by_device():
            try:
                self._method.absorb(self.decode(logged.body, logged.round, logged.device_id))
            except (MethodFault, WireError) as error:
                self._quarantine(row, logged, error)
                return False
            self.participants += 1
        sums = self._store.shares.sums()
        fetched = zip(sums, self.fetch(self._store.number, sums), strict=True)
        for number, shares in groupby(fetched, lambda each: each[0].round):
            # Of a round without quorum first the whole, as if one process had had all of it.
            method = self._method if number == row.round else self._opened_anew(number)
            for share, found in shares:
                state = self._store.shares.state(share) if found is None else found
                method.merge(unpack_state(state))
            if method is not self._method:
                self._method.merge(method.share())
        self.participants = self._waiting()
        return True

    def _opened_anew(self, number: int) -> GuardedMethod:
        """The method as it was when an earlier round opened, since which no version was made."""
        version = self._store.checkpoints.get("version")
        assert version is not None
        method = self._new_method(self.items)
        method.restore(version.state)
        method.open_round(number)
        return method

    def _waiting(self) -> int:
        return self._store.log.waiting() + self._store.shares.summed()
