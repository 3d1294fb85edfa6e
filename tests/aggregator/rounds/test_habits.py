"""For how long a round waits for each device."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aggregator.rounds.attendance import (
    KnownHabits,
    is_waited_for,
    with_update,
    without_update,
)
from aggregator.store import SQLiteDatabase, Store
from aggregator.store.rows import Habit
from aggregator.tables import TomlTable
from aggregator.task.file import RoundSettings
from tests.fakes.homes import make_home

DEADLINE = 300.0
SETTINGS = RoundSettings.read(TomlTable({}))
DEVICE = b"a"

seconds = st.floats(0.0, DEADLINE, width=32)


@given(st.lists(seconds, min_size=1, max_size=30))
def test_a_device_is_waited_for_longer_than_it_has_taken_of_late(times: list[float]) -> None:
    habit = Habit()
    for each in times:
        habit = with_update(habit, each)
        assert habit.missed == 0 and is_waited_for(habit, 1)
        assert habit.seconds is not None and each <= habit.seconds <= max(times)


def test_a_longest_time_fades() -> None:
    habit = with_update(Habit(), 200.0)
    for _ in range(20):
        habit = with_update(habit, 4.0)
    assert habit.seconds is not None and habit.seconds < 4.0 / 0.75


def test_a_sleeper_is_waited_for_twice_and_one_of_whom_nothing_came_once() -> None:
    known, unknown = with_update(Habit(), 4.0), Habit()
    for _ in range(2):
        assert is_waited_for(known, 1)
        known = without_update(known, lives=False)
    unknown = without_update(unknown, lives=False)
    assert not any(is_waited_for(each, n) for each in (known, unknown) for n in range(1, 200))
    assert is_waited_for(with_update(known, 100.0), 7)


@given(st.lists(st.booleans(), max_size=2000))
def test_whoever_sends_no_update_holds_ever_fewer_rounds(says_so: list[bool]) -> None:
    """Whether it says that it has none, or says nothing and lets the round run out."""
    habit, held = with_update(Habit(), DEADLINE), 0
    for number, says in enumerate(says_so, 1):
        waited = is_waited_for(habit, number)
        held += waited
        if waited:
            habit = without_update(habit, lives=says)
        elif says:
            habit = habit._replace(lives=True)
        assert held <= 3 + math.log2(number)


@given(st.integers(0, 40), st.integers(1, 10**6))
def test_who_lives_is_waited_for_again_and_again(misses: int, number: int) -> None:
    habit = Habit()
    for _ in range(misses):
        habit = without_update(habit, lives=True)
    period = max(1, habit.missed)
    assert is_waited_for(habit, number + -number % period)
    assert not is_waited_for(habit._replace(lives=False), number) or misses < 2


def test_what_was_found_out_outlives_the_process(tmp_path: Path) -> None:
    path = make_home(tmp_path, "mqtt://127.0.0.1:1").database
    store = Store(SQLiteDatabase(path))
    habits = KnownHabits(store.first.habits)
    wait = habits.wait_seconds(DEVICE, 1, SETTINGS, DEADLINE)
    assert wait == DEADLINE  # nothing is known
    habits.heard(DEVICE, 20.0)
    habits.heard(b"b", 1.0)
    habits.heard(b"gone", 1.0)
    with store.database.transaction():
        habits.save([b"c"], lambda device_id: device_id != b"gone")
    again = KnownHabits(store.first.habits)
    for found in (habits, again):
        waits = [found.wait_seconds(each, 1, SETTINGS, DEADLINE) for each in (DEVICE, b"b", b"c")]
        assert waits == [40.0, 5.0, 0.0]
        assert found.wait_seconds(DEVICE, 1, SETTINGS, 30.0) == 30.0
    assert b"gone" not in store.first.habits.all()
    again.drop(DEVICE)
    with store.database.transaction():
        again.save([], lambda device_id: False)
    assert DEVICE not in store.first.habits.all()
    store.database.close()


def test_a_round_that_cannot_be_closed_blames_nobody(tmp_path: Path) -> None:
    store = Store(SQLiteDatabase(make_home(tmp_path, "mqtt://127.0.0.1:1").database))
    habits = KnownHabits(store.first.habits)
    for _ in range(3):
        try:
            with store.database.transaction():
                habits.save([DEVICE], lambda device_id: True)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert habits.of(DEVICE) == Habit() and store.first.habits.all() == {}
    store.database.close()
