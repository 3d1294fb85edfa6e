"""One coordinator: a lease in the store, which a standby takes over when it is not renewed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from aggregator.errors import AggregatorError
from aggregator.store import STORE_FAILURES, Store
from aggregator.store.cluster import Deposed, LeaseRow

_LOG = logging.getLogger(__name__)
LEASE_SECONDS = 6.0
_RENEW_SECONDS = 1.5
_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 120.0


class Lease:
    """Held from :meth:`take` on by a thread with a connection of its own: a round that takes long
    to close costs no lease. It is renewed while :meth:`alive` is called now and then.

    ``store``: a connection of its own, which it closes; ``holder`` and ``program`` are for people.
    ``clock`` gives monotonic seconds; ``ending`` is what it waits on, and is set by :meth:`end`.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        program: str,
        clock: Callable[[], float],
        ending: threading.Event,
    ) -> None:
        self._store = store
        self._holder, self._program = holder, program
        self._clock = clock
        self._alive_seconds = clock()
        self._ending = ending
        self._thread = threading.Thread(target=self._renew, name="tessera-lease", daemon=True)
        self.term = 0
        """Of ours; 0 before it was taken."""
        self.lost: Deposed | None = None
        """Why it is not ours any more."""

    def take(self, stopping: Callable[[], bool], *, wait: bool) -> bool:
        """Whether it is ours now; else ``stopping``. Raises AggregatorError where another process
        holds it, and it is not to be waited for. Who waits outlasts a store that is away."""
        said: LeaseRow | None = None
        away = False
        while not stopping():
            try:
                row = self._take()
            except STORE_FAILURES as error:
                if not wait:
                    raise
                if not away:
                    _LOG.warning("standing by, while the store is away: %s", error)
                away = True
                self._ending.wait(_RENEW_SECONDS)
                continue
            away = False
            if row is None:
                return True
            if not wait:
                self.require_free(stopping)
            elif said is None or said.term != row.term:
                said = row
                _LOG.info("standing by: %s coordinates (term %d)", row.holder, row.term)
            self._ending.wait(_LOOK_SECONDS)
        return False

    def require_free(self, stopping: Callable[[], bool]) -> None:
        """Raises AggregatorError while another process holds it and renews it: one that was killed
        is found out after one lease."""
        row = self._store.lease.find()
        if row is not None and self._outlives(row.until_unix_seconds, stopping):
            raise AggregatorError(
                f"{row.holder} coordinates this fleet: stop it first. In a Ray cluster (--address) "
                "another one may wait until it is gone, with --standby"
            )

    def _take(self) -> LeaseRow | None:
        """None, once it is ours; else who has it."""
        term = self._store.lease.take(self._holder, self._program, LEASE_SECONDS)
        if term is None:
            row = self._store.lease.find()
            assert row is not None
            return row
        self.term = term
        self._thread.start()
        return None

    def require(self, store: Store) -> None:
        """Inside a transaction of ``store``: nobody else writes as the coordinator up to its end.
        Raises Deposed."""
        store.lease.require(self.term)

    def alive(self) -> None:
        """The process still does its work. Raises Deposed."""
        self._alive_seconds = self._clock()
        if self.lost is not None:
            raise self.lost

    def end(self) -> None:
        """Let go of it: a standby need not wait."""
        self._ending.set()
        if self.term and self.lost is None:
            self._thread.join()
            try:
                self._store.lease.release(self.term)
            except (Deposed, *STORE_FAILURES) as error:
                _LOG.warning("the lease could not be given back: %s", error)
        self._store.database.close()

    def _outlives(self, until_unix_seconds: float, stopping: Callable[[], bool]) -> bool:
        """Whether it is renewed beyond what was seen of it."""
        while not stopping():
            row = self._store.lease.find()
            if row is None or not self._store.lease.is_held():
                return False
            if row.until_unix_seconds > until_unix_seconds:
                return True
            self._ending.wait(_LOOK_SECONDS)
        return False

    def _renew(self) -> None:
        while not self._ending.wait(_RENEW_SECONDS):
            if self._clock() - self._alive_seconds > _STUCK_SECONDS:
                continue  # the process hangs: another one shall take over
            try:
                self._store.lease.renew(self.term, LEASE_SECONDS)
            except Deposed as error:
                self.lost = error
                return
            except STORE_FAILURES as error:
                _LOG.warning("the lease was not renewed: %s", error)
