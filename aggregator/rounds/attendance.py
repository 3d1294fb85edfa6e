"""Who was selected for a round and not heard of yet, and when updates came."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from aggregator.store import TaskStore
from aggregator.store.rounds import RoundRow


class Attendance:
    """Of the current round, as this process hears of devices."""

    def __init__(self) -> None:
        self._missing: set[bytes] = set()
        self._any_heard = False
        self._arrivals = array("f")

    def begin(self, awaited: set[bytes]) -> None:
        """A round opens, or none is open (nobody is awaited)."""
        self._missing, self._any_heard, self._arrivals = awaited, False, array("f")

    def resume(self, store: TaskStore, row: RoundRow, selected: set[bytes]) -> None:
        """The round was open when the process started."""
        judged = set(store.log.judged(row.generation, row.round))
        self._missing, self._any_heard = selected - judged, bool(judged)
        self._arrivals = array("f", store.log.arrivals(row.round))

    def look(self, row: RoundRow) -> None:
        """Called before what follows is asked for. Here: nothing, for all is known."""

    @property
    def counted(self) -> int:
        """Updates."""
        return len(self._arrivals)

    @property
    def outstanding(self) -> int:
        """Devices that were not heard of."""
        return len(self._missing)

    @property
    def any_heard(self) -> bool:
        return self._any_heard

    @property
    def missing(self) -> Collection[bytes]:
        return self._missing

    def arrivals(self, row: RoundRow) -> NDArray[np.float32]:
        """Seconds after the round opened, of each update counted."""
        return np.asarray(self._arrivals, dtype=np.float32)

    def heard_of(self, device_id: bytes, counted_seconds: float | None = None) -> None:
        """A device had its verdict; ``counted_seconds`` after the opening if it was counted."""
        self._missing.discard(device_id)
        self._any_heard = True
        if counted_seconds is not None:
            self._arrivals.append(counted_seconds)

    def drop(self, device_id: bytes) -> None:
        """A device that will not be heard of."""
        self._missing.discard(device_id)

    def keep(self, selected: set[bytes]) -> None:
        """The others are not waited for any more."""
        self._missing &= selected


class CommittedAttendance(Attendance):
    """Of the current round, as others commit it to the store.

    Their counts tell when to look at who it was: verdicts are read when, by the counts, nobody is
    missing, and not before.
    """

    def __init__(self, store: TaskStore) -> None:
        super().__init__()
        self._store = store
        self._counted = 0
        self._heard = 0
        self._looked_at = 0  # devices heard of when the missing ones were looked at

    def begin(self, awaited: set[bytes]) -> None:
        super().begin(awaited)
        self._counted = self._heard = self._looked_at = 0

    def resume(self, store: TaskStore, row: RoundRow, selected: set[bytes]) -> None:
        counts = store.shares.counts(row.round)
        super().resume(store, row, selected)
        self._counted, self._heard = counts
        self._looked_at = self._heard

    def look(self, row: RoundRow) -> None:
        self._counted, heard = self._store.shares.counts(row.round)
        if heard == self._heard:
            return
        self._heard, self._any_heard = heard, True
        if heard - self._looked_at >= len(self._missing):
            self._missing.difference_update(self._store.log.judged(row.generation, row.round))
            self._looked_at = heard

    @property
    def counted(self) -> int:
        return self._counted

    @property
    def outstanding(self) -> int:
        return max(0, len(self._missing) - (self._heard - self._looked_at))

    def arrivals(self, row: RoundRow) -> NDArray[np.float32]:
        return self._store.shares.arrivals(row.round)
