"""One process that hears devices, and a coordinator that reads what workers committed, close a
round at the same moment, and know the same of each device afterwards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.rounds.attendance import Attendance, CommittedAttendance, KnownHabits, asked_share
from aggregator.store import SQLiteDatabase, Store
from aggregator.store.rows import Habit, RoundRow, ShareRow, StoredVerdict
from aggregator.tables import TomlTable
from aggregator.task.file import RoundSettings
from tests.fakes.homes import make_home

DEVICES = [bytes([place]) * 16 for place in range(6)]
LENGTH = 300.0
SETTINGS = RoundSettings.read(TomlTable({"quorum": 2}))
TIMES = [0.0, 1.0, 3.0, 10.0, 40.0, 90.0, 140.0, 250.0]

known = st.builds(
    Habit,
    st.none() | st.sampled_from(TIMES),
    st.sampled_from([0, 0, 0, 1, 2, 4, 8]),
    st.booleans(),
)
# Of each device when it comes, if at all, and with what.
comes = st.tuples(
    st.none() | st.sampled_from(TIMES),
    st.sampled_from(["counted", "refused", "late", "noted late"]),
)


class Both:
    """The same round, heard of in both ways."""

    def __init__(self, folder: Path, number: int, habits: dict[bytes, Habit]) -> None:
        home = make_home(folder, "mqtt://127.0.0.1:1")
        self.store = Store(SQLiteDatabase(home.database))
        self.task = self.store.first
        with self.store.database.transaction():
            self.task.habits.put(habits)
            self.store.devices.note_seen(dict.fromkeys(DEVICES[::2], 1))
        self.row = RoundRow(number, 1, 0, 0.0, LENGTH, bytes(32), 2**64 - 1, len(DEVICES), 0)
        self.heard = self.alone()
        self.read = CommittedAttendance(self.task, SETTINGS)
        for each in (self.heard, self.read):
            each.begin(number, LENGTH, set(DEVICES))
        self.counted = self.judged = 0

    def alone(self) -> Attendance:
        """Of one process."""
        devices = self.store.devices
        return Attendance(KnownHabits(self.task.habits), SETTINGS, devices.seen_among)

    def comes(self, device_id: bytes, seconds: float, how: str) -> None:
        if "late" in how:
            late = None if how == "noted late" else seconds
            self.heard.came_late(device_id, late, seconds)
            self.task.late.add({device_id: late})
            return
        reason = None if how == "counted" else "bad-values"
        self.judged += 1
        self.counted += reason is None
        with self.store.database.transaction():
            verdict = StoredVerdict(1, self.row.round, device_id, bytes(32), reason, seconds)
            self.task.log.append([], [verdict])
            share = ShareRow(self.row.round, 0, 1, self.judged, self.counted, self.judged, None)
            self.task.shares.put(share)
        self.heard.heard_of(device_id, seconds if reason is None else None)

    def closes(self, elapsed: float) -> tuple[float, float]:
        for each in (self.heard, self.read):
            each.look(self.row, elapsed)
        found = [
            each.closes_seconds(elapsed, lambda: self.counted >= SETTINGS.quorum)
            for each in (self.heard, self.read)
        ]
        return found[0], found[1]


@settings(max_examples=150)
@given(
    number=st.integers(1, 20),
    habits=st.lists(known, min_size=6, max_size=6),
    events=st.lists(comes, min_size=6, max_size=6),
)
def test_a_coordinator_closes_rounds_as_one_process_does(
    number: int, habits: list[Habit], events: list[tuple[float | None, str]]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        both = Both(Path(folder), number, dict(zip(DEVICES, habits, strict=True)))
        coming = [(at, n, how) for n, (at, how) in enumerate(events) if at is not None]
        for seconds, place, how in sorted(coming):
            both.comes(DEVICES[place], seconds, how)
            ours, theirs = both.closes(seconds)
            assert (ours <= seconds) == (theirs <= seconds)
        both.store.devices.note_seen({DEVICES[1]: 2})
        for elapsed in (*TIMES, LENGTH):
            ours, theirs = both.closes(elapsed)
            assert (ours <= elapsed) == (theirs <= elapsed)
        both.read.look_at_all(both.row)
        assert both.heard.in_vain(LENGTH) == both.read.in_vain(LENGTH)
        for device_id in DEVICES:
            assert both.heard.habits.of(device_id) == both.read.habits.of(device_id)
        assert set(both.heard.missing) == set(both.read.missing)
        both.store.database.close()


@settings(max_examples=40)
@given(
    habits=st.lists(known, min_size=6, max_size=6),
    events=st.lists(comes, min_size=6, max_size=6),
)
def test_a_process_that_starts_in_a_round_waits_for_the_same_devices(
    habits: list[Habit], events: list[tuple[float | None, str]]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        both = Both(Path(folder), 3, dict(zip(DEVICES, habits, strict=True)))
        for place, (at, how) in enumerate(events):
            if at is not None and "late" not in how:
                both.comes(DEVICES[place], at, how)
        again = both.alone()
        read_again = CommittedAttendance(both.task, SETTINGS)
        for each in (again, read_again):
            each.resume(both.task, both.row, set(DEVICES))
            for elapsed in (0.0, 5.0, 50.0, 299.0):
                for one in (each, both.heard):
                    one.look(both.row, elapsed)
                assert each.waited_for(elapsed) == both.heard.waited_for(elapsed)
                assert each.in_vain(elapsed) == both.heard.in_vain(elapsed)
            assert [each.habits.of(d) for d in DEVICES] == [
                both.heard.habits.of(d) for d in DEVICES
            ]
        both.store.database.close()


def test_so_many_times_as_many_are_asked_as_are_wanted_of_those_that_are_likely() -> None:
    wanted = RoundSettings.read(TomlTable({"wanted": 100, "over_select": 1.3, "share": 0.5}))
    assert asked_share(wanted, 1000) == pytest.approx(0.13)
    assert asked_share(wanted, 200) == asked_share(wanted, 0) == 0.5  # the share is never exceeded
    assert asked_share(SETTINGS, 10) == 1.0
