"""Devices that are asleep, dead, slow or liars: how long rounds last, and whether all are counted
who are awake."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator.keys.registry import Registry
from aggregator.operate.waiting import WaitingRound
from aggregator.store.rows import RoundRow
from aggregator.task.file import Selector
from device_sdk.wire.publish.receipts import RecordType
from tests.attacks.conftest import MakeStage
from tests.attacks.round_times import Fleet, play
from tests.attacks.stage import Stage

_ROUND = "quorum = 2\nwait_for_devices = 4\ndeadline_seconds = 300\n"
LEAST = 5.0
"""No round of the default settings closes sooner without everybody."""


def seconds(row: RoundRow) -> float:
    assert row.closed_unix_seconds is not None
    return row.closed_unix_seconds - row.opened_unix_seconds


def counted(stage: Stage, row: RoundRow) -> set[int]:
    """The places of the devices that a round counted."""
    ids = {device.grant.device_id: device.place for device in stage.devices}
    came = stage.store.first.log.came(row.generation, row.round)
    return {ids[device_id] for device_id, found in came if found is not None}


def run_rounds(stage: Stage, count: int, within_seconds: float) -> list[RoundRow]:
    """The next rounds that end."""
    before = len(stage.closed())
    stage.run_until(lambda: len(stage.closed()) >= before + count, within_seconds)
    return stage.closed()[::-1][before : before + count]


def trained(stage: Stage, *times: float) -> Stage:
    """How long the devices train."""
    for device, each in zip(stage.devices, times, strict=True):
        device.train_seconds = each
    return stage


@pytest.fixture
def four(make_stage: MakeStage) -> Stage:
    """Three quick devices and a slow one, of which two rounds have counted each."""
    stage = trained(make_stage(devices=4, round_lines=_ROUND), 2.0, 2.0, 2.0, 100.0)
    rows = run_rounds(stage, 2, 300.0)
    assert [counted(stage, row) for row in rows] == [{0, 1, 2, 3}] * 2
    return stage


def test_one_round_waits_for_devices_that_never_came_and_the_others_do_not(tmp_path: Path) -> None:
    found = play(tmp_path, Fleet("", (2.0,) * 8, frozenset(range(2, 8))), 6)
    # They have no sessions: it waits no longer than one takes to open.
    assert found.seconds[0] == pytest.approx(30.0, abs=1.0)
    assert max(found.seconds[1:]) <= LEAST + 1.0
    assert found.counted == {0: 1.0, 1: 1.0}


def test_a_device_that_opened_a_session_has_its_whole_first_round(make_stage: MakeStage) -> None:
    stage = trained(make_stage(devices=4, round_lines=_ROUND), 2.0, 2.0, 2.0, 200.0)
    stage.devices[2].kill()
    (first,) = run_rounds(stage, 1, 600.0)
    assert counted(stage, first) == {0, 1, 3} and 200.0 <= seconds(first) < 300.0 + 1.0


def test_a_device_that_was_there_and_died_costs_one_deadline(make_stage: MakeStage) -> None:
    stage = trained(make_stage(devices=4, round_lines=_ROUND), 2.0, 2.0, 2.0, 200.0)
    stage.run_until(lambda: stage.devices[3].jobs == 1)
    stage.devices[3].kill()
    rows = run_rounds(stage, 3, 900.0)
    assert [round(seconds(row)) for row in rows] == [300, 5, 5]


def test_a_fleet_without_sleepers_loses_nothing_and_its_slowest_class_neither(
    tmp_path: Path,
) -> None:
    trains = (2.0,) * 6 + (40.0, 140.0)
    found = play(tmp_path, Fleet("", trains), 6)
    assert found.counted == dict.fromkeys(range(8), 1.0)
    assert max(found.seconds[1:]) <= 141.0


def test_a_slow_device_is_counted_though_others_sleep_and_are_flaky(tmp_path: Path) -> None:
    trains = (2.0,) * 7 + (100.0,)
    found = play(tmp_path, Fleet("", trains, frozenset({4, 5, 6}), flaky=0.1), 20, seed=1)
    assert found.counted[7] >= 0.9


def test_rounds_do_not_wait_for_a_device_that_was_killed(four: Stage) -> None:
    four.devices[3].kill()
    rows = run_rounds(four, 4, 600.0)
    # Twice its hundred seconds, twice: it may have missed one round alone.
    assert [round(seconds(row) / 100.0) for row in rows] == [2, 2, 0, 0]
    assert all(seconds(row) <= LEAST + 0.1 for row in rows[2:])


def test_a_slow_device_that_comes_back_is_in_within_two_rounds_of_its_own(four: Stage) -> None:
    four.devices[3].kill()
    run_rounds(four, 8, 900.0)
    four.devices[3].start()
    four.devices[3].train_seconds = 100.0
    started = four.unix()
    four.run_until(lambda: any(3 in counted(four, row) for row in four.closed()[:-10]), 600.0)
    assert four.unix() - started <= 2 * 100.0 + 60.0
    # And stays in.
    rows = run_rounds(four, 3, 600.0)
    assert all(3 in counted(four, row) for row in rows[1:])


@pytest.mark.parametrize("after", [0.5, 3.0, 50.0])
def test_kill_nine_in_a_round_changes_nothing_of_whom_it_waits_for(
    four: Stage, after: float
) -> None:
    four.devices[2].kill()
    run_rounds(four, 3, 600.0)
    four.devices[0].train_seconds = 60.0  # so that the round is there for long enough
    run_rounds(four, 1, 600.0)
    four.run(after)
    machine = four.parts.first.rounds
    before = sorted(machine._attendance.waited_for(0.0)), machine._attendance.habits._of
    four.restart_aggregator()
    machine = four.parts.first.rounds
    assert (sorted(machine._attendance.waited_for(0.0)), machine._attendance.habits._of) == before
    rows = run_rounds(four, 3, 900.0)
    assert all(2 not in counted(four, row) for row in rows)
    assert all(seconds(row) <= 101.0 for row in rows[1:])


def test_a_fleet_that_has_become_slow_is_waited_for(four: Stage) -> None:
    trained(four, 30.0, 36.0, 40.0, 100.0)
    four.devices[3].kill()
    rows = run_rounds(four, 4, 900.0)
    # Each of the three takes far more than twice its time of before; the fourth is missing.
    assert all(counted(four, row) == {0, 1, 2} for row in rows[1:])


def test_nobody_is_blamed_for_a_broker_that_was_away(four: Stage) -> None:
    habits = dict(four.parts.first.rounds._attendance.habits._of)
    for device in four.devices:
        device.set_connected(False)
    rows = run_rounds(four, 3, 1200.0)
    assert {row.next_version for row in rows[1:]} == {None}
    found = four.parts.first.rounds._attendance.habits._of
    assert {key: each.missed for key, each in found.items()} == dict.fromkeys(habits, 0)


def test_whoever_says_each_time_that_it_has_no_update_holds_few_rounds(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(devices=4, round_lines=_ROUND + "most_rounds = 60")
    trained(stage, 2.0, 2.0, 2.0, 2.0)
    run_rounds(stage, 1, 300.0)
    # It fetches each round, and begins none: another app has the processor, perhaps.
    liar = stage.devices[3]
    liar.participant.turn = lambda *_: None  # type: ignore[method-assign]
    stage.liars.add(liar.place)
    rows = run_rounds(stage, 50, 5000.0)
    held = [row for row in rows if seconds(row) > LEAST + 0.1]
    assert len(held) <= 10 and sum(map(seconds, rows)) <= 50 * LEAST + 10 * 300.0


def test_one_device_that_comes_as_late_as_it_may_makes_no_round_longer_than_the_deadline(
    four: Stage,
) -> None:
    # It is what an honest slow device is, and each round counts it.
    four.devices[3].train_seconds = 290.0
    rows = run_rounds(four, 4, 2000.0)
    assert max(map(seconds, rows)) <= 300.0
    assert all({0, 1, 2} <= counted(four, row) for row in rows)
    four.devices[3].train_seconds = 2.0


def test_a_round_closes_at_as_many_updates_as_are_wanted(make_stage: MakeStage) -> None:
    lines = "quorum = 2\nwanted = 3\nover_select = 2.0\nwait_for_devices = 8\n"
    stage = make_stage(devices=8, round_lines=lines)
    trained(stage, *(2.0 + place for place in range(8)))
    rows = run_rounds(stage, 6, 2000.0)
    assert all(row.participants is not None and row.participants >= 2 for row in rows)
    assert {row.expected for row in rows} != {8}
    full = [row.participants or 0 for row in rows if row.expected >= 3]
    # One that came in together with the third counts as well.
    assert full and all(3 <= each <= 4 for each in full) and min(full) == 3


def test_status_says_whom_a_round_waits_for_and_when_it_closes(four: Stage) -> None:
    four.devices[2].kill()
    run_rounds(four, 3, 600.0)
    stage, now = four, four.unix() + 3.0
    stage.run(3.0)
    row = stage.parts.first.rounds.current
    assert row is not None
    seen = WaitingRound.look(
        stage.store.first,
        row,
        Registry(stage.store.devices),
        Selector(),
        stage.parts.first.task.round,
        now,
    )
    slow, dead = (stage.devices[place].grant.device_id for place in (3, 2))
    assert [each.device_id for each in seen.awaited] == [slow]
    assert [each.device_id for each in seen.passed_over] == [dead]
    assert seen.closes_seconds == pytest.approx(2 * 100.0, abs=5.0)
    text = "\n".join(seen.lines(stage.store.devices.seen(), now))
    assert "waits        for 1 of 4 devices: " in text and "in 3 min without them" in text
    assert (
        "passes over  1 that sent no update of late" in text and "(last heard of 7 min ago)" in text
    )


def test_a_device_that_opened_a_session_was_seen(make_stage: MakeStage) -> None:
    stage = make_stage(devices=3, round_lines="quorum = 3\nwait_for_devices = 9")
    stage.hand = "no round opens before 9 devices are enrolled"
    stage.devices[2].kill()
    stage.run(60.0)  # no round opens
    seen = stage.store.devices.seen()
    assert stage.sent_up(0, RecordType.UPDATE) == []
    assert set(seen) == {stage.devices[place].grant.device_id for place in (0, 1)}
    assert all(abs(each - stage.unix()) <= 61 for each in seen.values())


@pytest.mark.parametrize(
    "lines", ["quorum = 1\nshare = 0.1", "quorum = 2\nshare = 0.3", "quorum = 1\nwanted = 1"]
)
def test_rounds_that_ask_some_of_the_devices_ask_some_that_are_awake(
    make_stage: MakeStage, lines: str
) -> None:
    stage = make_stage(
        devices=25, round_lines=f"{lines}\nwait_for_devices = 25\nleast_deadline_seconds = 5"
    )
    for device in stage.devices:
        device.train_seconds = 2.0
    for device in stage.devices[5:]:
        device.kill()
    # The first opens before anybody has a session; its deadline is an hour away.
    rows = run_rounds(stage, 20, 10_000.0)[1:]
    assert max(map(seconds, rows)) <= 40.0, [round(seconds(row)) for row in rows]
    assert all(row.next_version is not None for row in rows)
    if "wanted" in lines:
        stage.liars = set(range(25))  # one is counted in each round: all of them, after many
