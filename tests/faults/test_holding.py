"""Whether something kept a worker from its store is told by more than the worker."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.fakes.homes import make_home
from tests.fakes.waiting import wait_until
from tests.faults import holding
from tests.faults.counters import Counters
from tests.faults.holding import KillCost, Watch
from tests.faults.taken_in import taken_by


@contextmanager
def watched(folder: Path, reaches_since: float) -> Iterator[Watch]:
    """This process, with an update since half a second."""
    home = make_home(folder / "home", "mqtt://127.0.0.1:1")
    counters = folder / "counters"
    mine = Counters(taken_by(counters, os.getpid()))
    mine.put("oldest_micros", round(1e6 * (time.monotonic() - 0.5)))
    watch = Watch(counters, home.open_store, lambda process: reaches_since)
    try:
        wait_until(lambda: len(watch.moments) > 1)
        yield watch
    finally:
        watch.end()


def now(watch: Watch) -> KillCost:
    cost = watch.cost(os.getpid(), time.monotonic())
    assert cost is not None
    return cost


def test_a_store_that_keeps_everybody_waiting_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_SLOW_SECONDS", 10.0)
    with watched(tmp_path, 0.0) as watch:
        found = now(watch)
        assert found.undisturbed and found.oldest_seconds >= 0.5
        assert watch.cost(1, time.monotonic()) is None, "not a worker"
        monkeypatch.setattr(holding, "_SLOW_SECONDS", 0.2)
        with closing(watch._bystander._open().database) as held, held.transaction():
            wait_until(lambda: not now(watch).undisturbed)


def test_whoever_is_cut_off_itself_is_told_apart(tmp_path: Path) -> None:
    with watched(tmp_path, math.inf) as watch:
        assert not now(watch).undisturbed
        assert not any(each.undisturbed for each in watch.moments)
