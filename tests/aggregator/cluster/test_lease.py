"""Who coordinates: the ten seconds in which another one takes over, in time that a test holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.cluster.serve import Lease
from aggregator.home import AggregatorHome
from aggregator.store import Store
from aggregator.store.cluster import Deposed
from tests.fakes.held_time import HeldEvent, HeldTime
from tests.fakes.homes import make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

TEN_SECONDS = 10.0


class Coordinator:
    """A process that stands by, and coordinates once it may."""

    def __init__(
        self, home: AggregatorHome, time: HeldTime, now: Callable[[], float], name: str
    ) -> None:
        self._home, self._time, self._now = home, time, now
        self.ending: HeldEvent = time.event()
        self.lease = Lease(self._opened(), name, "1.0", time.now, self.ending)
        self._thread = threading.Thread(target=self._stand_by, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Or kill: no step of it is seen any more."""
        self._time.forget(self.ending)

    def thaw(self) -> None:
        """It goes on where it was, and finds that its time has passed."""
        self.ending.end_wait()
        wait_until(lambda: self.lease.lost is not None)

    def end(self) -> None:
        self.ending.set()
        self._thread.join(PATIENCE_SECONDS)
        self.lease.end()

    def _opened(self) -> Store:
        store = self._home.open_store()
        store.database.now = self._now  # type: ignore[method-assign]
        return store

    def _stand_by(self) -> None:
        self.lease.take(self.ending.is_set, wait=True)


class Stage:
    """A home's coordinators, of whom one holds the lease."""

    def __init__(self, home: AggregatorHome) -> None:
        self.time = HeldTime()
        self.ahead_seconds = 0.0  # of the store's calendar
        self._home = home
        self._all: list[Coordinator] = []
        self.holder = self.another()
        self.pass_until_term(1)

    def another(self) -> Coordinator:
        def now() -> float:
            return self.time.now() + self.ahead_seconds

        made = Coordinator(self._home, self.time, now, f"process {len(self._all)}")
        self._all.append(made)
        return made

    def pass_seconds(self, seconds: float) -> None:
        until = self.time.seconds + seconds
        while self.time.seconds < until:
            self.time.step(until)

    def pass_until_term(self, term: int) -> float:
        """The seconds that it took."""
        began = self.time.seconds
        while max(each.lease.term for each in self._all) < term:
            assert self.time.seconds < began + 10 * TEN_SECONDS
            self.time.step(began + 10 * TEN_SECONDS)
        return self.time.seconds - began

    @contextmanager
    def without_the_table(self) -> Iterator[None]:
        """Each look at the lease fails."""
        store = self._home.open_store()
        try:
            store.database.execute("ALTER TABLE lease RENAME TO lease_elsewhere")
            yield
            store.database.execute("ALTER TABLE lease_elsewhere RENAME TO lease")
        finally:
            store.database.close()

    def end(self, coordinator: Coordinator) -> None:
        self._all.remove(coordinator)
        self.time.forget(coordinator.ending)
        coordinator.end()

    def close(self) -> None:
        for each in self._all:
            each.end()


@contextmanager
def staged(folder: Path, store_url: str | None) -> Iterator[Stage]:
    stage = Stage(make_home(folder, "mqtt://127.0.0.1:1", store_url=store_url))
    try:
        yield stage
    finally:
        stage.close()


def test_a_standby_coordinates_ten_seconds_after_a_kill_at_the_latest(
    tmp_path: Path, store_url: str | None
) -> None:
    took = []
    with staged(tmp_path, store_url) as stage:
        for term in range(1, 9):
            # Each time at other moments between two renewals, and between two looks.
            stage.pass_seconds(0.31 * term)
            standby = stage.another()
            stage.pass_seconds(3.0 + 0.17 * term)
            assert not standby.lease.term, "the one that lives is not taken for dead"
            stage.holder.lease.alive()
            stage.holder.freeze()
            took.append(stage.pass_until_term(term + 1))
            assert standby.lease.term == term + 1
            stage.holder = standby
    print(f"seconds from the kill on: {', '.join(f'{each:.2f}' for each in took)}")
    assert max(took) <= 6.5, "what is left of ten seconds is for the work to begin in"
    assert min(took) > 4.5, "nobody takes a lease that runs"


@pytest.mark.parametrize("ahead_seconds", [3600.0, -3600.0])
def test_a_store_that_failed_over_to_another_calendar_keeps_no_dead_coordinator(
    tmp_path: Path, ahead_seconds: float
) -> None:
    with staged(tmp_path, None) as stage:
        stage.another()
        stage.pass_seconds(3.0)
        stage.holder.freeze()
        stage.ahead_seconds = ahead_seconds
        assert stage.pass_until_term(2) <= TEN_SECONDS


def test_one_that_lives_keeps_it_and_one_that_hangs_does_not(
    tmp_path: Path, store_url: str | None
) -> None:
    with staged(tmp_path, store_url) as stage:
        standby = stage.another()
        for _ in range(4):
            stage.pass_seconds(40.0)
            stage.holder.lease.alive()
        assert not standby.lease.term
        stage.pass_seconds(119.0)  # its loop hangs, while its lease's thread goes on
        assert not standby.lease.term
        stage.pass_until_term(2)
        assert standby.lease.term == 2


def test_one_that_was_frozen_finds_out(tmp_path: Path, store_url: str | None) -> None:
    with staged(tmp_path, store_url) as stage:
        frozen, standby = stage.holder, stage.another()
        stage.pass_seconds(2.0)
        frozen.freeze()
        stage.pass_until_term(2)
        frozen.thaw()
        with pytest.raises(Deposed, match=r"process 1 \(term 2\)"):
            frozen.lease.alive()
        standby.lease.alive()


def test_one_that_ends_keeps_nobody_waiting(tmp_path: Path, store_url: str | None) -> None:
    with staged(tmp_path, store_url) as stage:
        stage.another()
        stage.pass_seconds(2.0)
        stage.end(stage.holder)
        assert stage.pass_until_term(2) <= 0.5


def test_one_that_stands_by_outlasts_a_store_that_is_away(
    tmp_path: Path, store_url: str | None
) -> None:
    with staged(tmp_path, store_url) as stage:
        standby = stage.another()
        stage.pass_seconds(2.0)
        stage.holder.freeze()
        with stage.without_the_table():
            stage.pass_seconds(60.0)
        assert stage.pass_until_term(2) <= TEN_SECONDS
        assert standby.lease.term == 2
