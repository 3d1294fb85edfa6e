"""The aggregator's calendar may say what it likes: a verdict never turns into another."""

from __future__ import annotations

import re
import shutil

import pytest

from aggregator.clock import SteadyClock
from aggregator.store import Database
from device_sdk.enrol import trust
from device_sdk.home.home import Home
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.world import Pace, TrainingOptions
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import Parcel
from tests.attacks.stage import Stage
from tests.fakes.tasks import add_task, task_text
from tests.faults.known import ITEMS, WIDTH

_DAY_SECONDS = 86_400.0
_HOUSEKEEPING_SECONDS = 120.0


def _first_receipt_lost(make_stage: MakeStage) -> Stage:
    """A stage on which device 0 was counted in round 1, does not know it, and is switched off."""
    stage = make_stage()
    stage.drop = lambda parcel: (
        parcel.to == "device-0" and parcel.payload[1:2] == bytes([RecordType.RECEIPT])
    )
    stage.await_version(1)
    stage.run(1.0)
    assert stage.verdict(0, 1) is None and _stored(stage.store.database, stage)
    stage.devices[0].kill()
    stage.run(_HOUSEKEEPING_SECONDS)  # its age is counted from here on
    return stage


def _stored(database: Database, stage: Stage) -> bool:
    """Whether the verdict on device 0's update of round 1 is in the log."""
    query = "SELECT 1 FROM verdicts WHERE round = 1 AND device_id = ?"
    return database.row(query, (stage.devices[0].grant.device_id,)) is not None


def _told(stage: Stage) -> str | None:
    """What device 0 hears of round 1 when it is back."""
    stage.drop = _nothing
    stage.devices[0].start()
    stage.run(30.0)
    return stage.verdict(0, 1)


def _nothing(parcel: Parcel) -> bool:
    return False


def test_a_clock_that_jumps_a_month_ahead_and_back_forgets_nothing(make_stage: MakeStage) -> None:
    stage = _first_receipt_lost(make_stage)
    stage.offset_seconds = 31 * _DAY_SECONDS
    stage.now_seconds += 3601.0  # whatever is done once an hour is done meanwhile
    stage.run(_HOUSEKEEPING_SECONDS)
    stage.offset_seconds = 0.0
    stage.run(5.0)
    assert _stored(stage.store.database, stage)
    assert _told(stage) == "counted"


def test_rounds_go_on_after_a_clock_jumped_ahead_and_back_between_them(
    make_stage: MakeStage,
) -> None:
    stage = make_stage()
    stage.run_until(lambda: stage.version == 1)  # all have their sessions
    stage.offset_seconds = 100 * _DAY_SECONDS
    stage.await_version(2)
    assert stage.parts.first.rounds.current is None
    stage.offset_seconds = 0.0
    stage.await_version(4, 60.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_round_ends_though_the_clock_was_ahead_when_it_opened(
    make_stage: MakeStage, restarted: bool
) -> None:
    stage = make_stage(
        round_lines="quorum = 2\ndeadline_seconds = 60\nleast_deadline_seconds = 60\n"
        "pause_seconds = 5"
    )
    stage.await_version(1)
    stage.devices[2].kill()
    stage.offset_seconds = 100 * _DAY_SECONDS
    stage.run_until(lambda: stage.parts.first.rounds.arrived == 2)
    stage.offset_seconds = 0.0
    if restarted:
        stage.restart_aggregator()
    stage.run(50.0)
    assert stage.version == 1
    stage.await_version(2, 60.0)


_ROUNDS = "quorum = 1\nwait_for_devices = 3\ndeadline_seconds = 60\npause_seconds = 5"


def _restarted_at(stage: Stage, offset_seconds: float) -> None:
    stage.kill_aggregator()
    stage.offset_seconds = offset_seconds
    stage.start_aggregator()


@pytest.mark.parametrize("hours", [1 / 6, 12.0, 40 * 24.0, 100 * 24.0, -1 / 6, -400 * 24.0])
def test_a_serve_that_began_at_a_wrong_time_and_then_at_the_right_one(
    make_stage: MakeStage, hours: float
) -> None:
    """A computer without a battery, before NTP came; a hundred days is past its descriptor."""
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    _restarted_at(stage, hours * 3600.0)
    stage.live_on()
    _restarted_at(stage, 0.0)
    stage.live_on()
    for device in stage.devices:
        device.restart()
    stage.live_on()
    held = stage.parts.keys.current().descriptor
    assert held.issued_unix_seconds <= stage.unix() + _DAY_SECONDS


@pytest.mark.parametrize("seconds", [-30.0, -600.0, 600.0, 43_200.0, 100 * _DAY_SECONDS])
def test_a_clock_that_is_set_while_serve_runs(make_stage: MakeStage, seconds: float) -> None:
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    signed = stage.parts.unix_clock()
    stage.offset_seconds = seconds
    stage.run(30.0)
    assert abs(stage.parts.unix_clock() - signed - 30.0) < 1.0, "no jump is signed at once"
    assert "the clock was set" in (stage.store.facts.clock_problem or "")
    stage.live_on()
    stage.run(120.0)
    assert abs(stage.parts.unix_clock() - stage.unix()) < 1.0
    assert not stage.store.facts.clock_problem


def test_a_clock_that_goes_to_and_fro_is_not_followed(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    opened = [device.participant.sessions.opened for device in stage.devices]
    for turn in range(60):
        stage.offset_seconds = 600.0 if turn % 2 else -600.0
        stage.run(10.0)
    stage.offset_seconds = 0.0
    assert stage.version > 20
    assert opened == [device.participant.sessions.opened for device in stage.devices]


def test_a_clock_set_past_the_end_of_the_delegation_is_not_followed(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    stage.offset_seconds = 9_000 * _DAY_SECONDS
    stage.run(300.0)
    assert "rotate keys" in (stage.store.facts.clock_problem or "")


@pytest.mark.parametrize("rate", [1.01, 0.99])
def test_a_device_whose_clock_runs_fast_or_slow_is_counted_all_day(
    make_stage: MakeStage, rate: float
) -> None:
    stage = make_stage(round_lines=_ROUNDS.replace("pause_seconds = 5", "pause_seconds = 1800"))
    stage.idle_seconds = 60.0
    device = stage.devices[0]
    device.kill()
    device.rate = rate
    device.start()
    stage.run(_DAY_SECONDS)
    jobs = [each.jobs for each in stage.devices]
    assert jobs[0] >= jobs[1] - 2 and jobs[0] > 40


def test_a_clock_that_stands_in_the_past_keeps_nothing_for_ever(make_stage: MakeStage) -> None:
    stage = _first_receipt_lost(make_stage)
    stage.offset_seconds = -300 * _DAY_SECONDS
    for _ in range(3):
        stage.now_seconds += 11 * _DAY_SECONDS
        stage.run(_HOUSEKEEPING_SECONDS)
    assert not _stored(stage.store.database, stage)


def test_what_was_forgotten_is_forgotten_under_any_clock(make_stage: MakeStage) -> None:
    stage = _first_receipt_lost(make_stage)
    for _ in range(3):
        stage.now_seconds += 11 * _DAY_SECONDS
        stage.run(_HOUSEKEEPING_SECONDS)
    assert not _stored(stage.store.database, stage)
    stage.offset_seconds = -40 * _DAY_SECONDS  # it was round 1's month again
    stage.restart_aggregator()
    assert _told(stage) == "forgotten"


def _bring_back_a_home_of_before_a_rotation(
    stage: Stage, offset_seconds: float, on_for_seconds: float
) -> None:
    """A backup of version 2's home takes the place of the one whose keys were rotated since, on a
    machine whose calendar is so far off. The aggregator went on for a while between the two, and
    is not started again."""
    stage.await_version(2)
    home, generation = stage.fleet.aggregator.folder, stage.store.facts.generation
    backup = home.with_name("backup")
    stage.kill_aggregator()
    shutil.copytree(home, backup)
    stage.start_aggregator()
    stage.run(on_for_seconds)
    stage.now_seconds += 10 * _DAY_SECONDS
    assert stage.command("rotate", "keys") == 0
    stage.run(100.0)
    stage.kill_aggregator()
    shutil.rmtree(home)
    shutil.copytree(backup, home)
    stage.offset_seconds = offset_seconds
    assert stage.command("restored", "--after", str(generation)) == 0


@pytest.mark.parametrize("days", [0.0, -5.0, 40.0])
def test_a_backup_of_before_a_rotation_goes_on_under_another_machine_s_calendar(
    make_stage: MakeStage, days: float
) -> None:
    stage = make_stage(judged=False, round_lines=_ROUNDS)
    _bring_back_a_home_of_before_a_rotation(stage, days * _DAY_SECONDS, on_for_seconds=100.0)
    stage.start_as_told()


@pytest.mark.parametrize("hours", [1.0, -5 * 24.0])
@pytest.mark.parametrize("restarted", [False, True])
def test_devices_say_what_to_run_where_no_broker_shows_that_keys_were_rotated_since_a_backup(
    make_stage: MakeStage, caplog: pytest.LogCaptureFixture, hours: float, restarted: bool
) -> None:
    stage = make_stage(judged=False, round_lines=_ROUNDS)
    _bring_back_a_home_of_before_a_rotation(stage, hours * 3600.0, on_for_seconds=0.0)
    stage.start_aggregator()
    stage.replace_broker()
    for device in stage.devices if restarted else ():
        device.restart()
    stage.run(600.0)
    assert stage.version < 4, "no device may take part under old keys"
    said = {device.participant.problem for device in stage.devices}
    assert len(said) == 1
    (words,) = said
    assert "older than the one that this device trusts" in words
    assert [each for each in caplog.messages if words in each], "the log says it too"
    (after,) = re.findall(r"tessera-aggregator rotate keys --after (\d+)", words)
    assert stage.command("rotate", "keys", "--after", after) == 0
    stage.live_on()
    assert {device.participant.problem for device in stage.devices} == {""}


def test_a_delegation_that_ends_under_serve_is_named_by_status_until_keys_are_rotated(
    make_stage: MakeStage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(round_lines=_ROUNDS.replace("pause_seconds = 5", "pause_seconds = 40"))
    stage.await_version(2)
    for _ in range(37):
        stage.now_seconds += 10 * _DAY_SECONDS
        stage.run(100.0)
    assert stage.command("status") == 0
    assert "the root key's delegation has ended at " in capsys.readouterr().out
    assert stage.command("rotate", "keys") == 0
    stage.run(30.0)
    assert stage.command("status") == 0
    assert "delegation" not in capsys.readouterr().out.partition("devices")[0]


def test_keys_that_are_rotated_in_1970_are_named_by_status(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    stage.offset_seconds = 1000.0 - stage.unix()
    assert stage.command("rotate", "keys") == 0
    stage.offset_seconds = 0.0
    stage.hand = "run tessera-aggregator rotate keys"


def test_no_code_is_made_that_shuts_its_device_out(
    make_stage: MakeStage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(round_lines=_ROUNDS)
    stage.await_version(2)
    capsys.readouterr()
    # As far ahead as a code goes, and further.
    for days, made in ((29, True), (50, False)):
        stage.offset_seconds = days * _DAY_SECONDS
        assert (stage.command("invite") == 0) is made
        stage.offset_seconds = 0.0
        said = capsys.readouterr()
        if made:
            device = stage.devices[0]
            device.kill()
            home = Home(device.folder)
            trust(home, said.out.strip())
            home.close()
            device.start()
        else:
            assert "set the clock right" in said.err.lower()
        stage.live_on()


@pytest.mark.parametrize("seconds", [280.0, -280.0, 30 * _DAY_SECONDS])
@pytest.mark.parametrize("restarted", [False, True])
def test_how_long_updates_take_is_not_told_by_the_calendar(
    make_stage: MakeStage, seconds: float, restarted: bool
) -> None:
    """The calendar is set, and followed, while one device trains."""
    stage = make_stage(round_lines="quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 3600")
    for device, each in zip(stage.devices, (2.0, 2.0, 200.0), strict=True):
        device.train_seconds = each
    stage.await_version(2, 900.0)
    stage.run(10.0)
    stage.offset_seconds = seconds
    if restarted:
        stage.restart_aggregator()
    stage.await_version(3, 900.0)
    habits = stage.parts.first.rounds._attendance.habits._of
    times = sorted(each.seconds or 0.0 for each in habits.values())
    assert times[0] < 10.0 and (restarted or 150.0 <= times[2] < 220.0), times
    assert times[2] <= 3600.0


@pytest.mark.parametrize("seconds", [1_000.0, -1_000.0])
def test_a_calendar_set_within_a_round_changes_neither_what_it_took_nor_how_late_updates_come(
    make_stage: MakeStage, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    stage = make_stage(round_lines="quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 3600")
    for device, each in zip(stage.devices, (200.0, 200.0, 500.0), strict=True):
        device.train_seconds = each
    stage.run(50.0)
    stage.offset_seconds = seconds  # and it is followed a minute later
    stage.devices[2].set_connected(False)
    stage.run_until(lambda: stage.parts.first.rounds.arrived == 2)
    rounds = stage.parts.first.rounds
    rounds._attendance.drop(stage.devices[2].grant.device_id)  # nobody waits for it any more
    stage.await_version(1)
    (row,) = [each for each in stage.store.first.rounds.latest(2) if each.round == 1]
    assert row.took_seconds is not None and 150.0 < row.took_seconds < 300.0
    assert abs((row.closed_unix_seconds or 0.0) - row.opened_unix_seconds) > 700.0
    stage.devices[2].set_connected(True)
    stage.run_until(lambda: rounds._attendance.habits.of(stage.devices[2].grant.device_id).seconds)
    late = rounds._attendance.habits.of(stage.devices[2].grant.device_id).seconds
    assert late is not None and 450.0 < late < 700.0
    assert stage.command("status") == 0
    said = capsys.readouterr().out
    assert re.search(r"^ *1 .* [34] min  .*made version 1", said, re.M), said


@pytest.mark.parametrize("days", [1.0, 40.0, -1.0])
def test_a_calendar_set_to_and_fro_lets_no_day_be_spent_again_and_again(
    make_stage: MakeStage, days: float
) -> None:
    """Each device may train for fifty seconds a day, five rounds of the twenty-four."""
    stage = make_stage(
        round_lines="quorum = 1\nwait_for_devices = 3\ndeadline_seconds = 600\n"
        "pause_seconds = 3000",
        pace=Pace(most_seconds=3600.0),
    )
    stage.idle_seconds = 600.0
    for each in stage.devices:
        each.kill()
        each.train_seconds = 10.0
        each.options = TrainingOptions(seconds_a_day=50.0)
        each.start()
    device, jobs = stage.devices[0], [0]
    for hour in range(60):
        stage.offset_seconds = days * _DAY_SECONDS if hour % 2 else 0.0
        stage.run(3600.0)
        jobs.append(device.jobs)
    of_days = [jobs[hour + 24] - jobs[hour] for hour in range(60 - 24)]
    assert min(of_days) >= 5 and max(of_days) <= 15, of_days
    stage.offset_seconds = 0.0
    # From just before a midnight on: a window that began among a day's five would see two days'.
    stage.run(2 * _DAY_SECONDS - (stage.unix() + 1800.0) % _DAY_SECONDS)
    for _ in range(3):
        before = device.jobs
        stage.run(_DAY_SECONDS)
        assert device.jobs - before == 5
    for each in stage.devices:  # those that live on have seconds left
        each.kill()
        each.options = TrainingOptions()
        each.start()


def _two_tasks(make_stage: MakeStage) -> Stage:
    """``default`` has rounds of a minute; ``air`` of half an hour."""
    stage = make_stage(judged=False, round_lines=_ROUNDS)
    home = stage.fleet.aggregator
    stage.kill_aggregator()
    lines = "quorum = 3\nwait_for_devices = 3\ndeadline_seconds = 1800\npause_seconds = 60"
    codecs = 'broadcast_codec = "float32"\nupdate_codec = "float32"'
    text = task_text(home, "air", lines, codecs, WIDTH)
    names = "".join(f"air-{row}\n" for row in range(ITEMS))
    (home.folder / "air.tsv").write_text(names)
    add_task(home, "air", text)
    for device in stage.devices:
        device.home.database.row("UPDATE membership SET is_wish = 0")
        device.kill()
        device.train_seconds = 20.0
        device.start()
        device.home.interactions.add([("anna", "air-1")], "air")
    stage.start_aggregator()
    return stage


def _last_counted(stage: Stage) -> dict[tuple[int, str], int]:
    """Of each device and task, the last round that it was counted in."""
    found = {(device.place, task): 0 for device in stage.devices for task in ("default", "air")}
    for device in stage.devices:
        for part in device.home.rounds._participations("ORDER BY number"):
            if part.verdict is not None and part.verdict.value == "counted":
                found[device.place, part.task] = part.round
    return found


@pytest.mark.parametrize("seconds", [-600.0, 30 * _DAY_SECONDS])
@pytest.mark.parametrize("restarted", [False, True])
def test_two_tasks_of_rounds_of_different_lengths_go_on_under_any_calendar(
    make_stage: MakeStage, seconds: float, restarted: bool
) -> None:
    stage = _two_tasks(make_stage)
    for offset in (0.0, seconds, 0.0):
        stage.offset_seconds = offset
        if restarted:
            stage.restart_aggregator()
        before = _last_counted(stage)
        stage.run(900.0)
        for which, last in _last_counted(stage).items():
            assert last > before[which] + 4, (offset, which)


def test_a_device_whose_clock_leaps_past_the_end_of_its_keys_asks_what_time_it_is(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(round_lines=_ROUNDS + "\n[keys]\ndescriptor_days = 1")
    assert stage.command("rotate", "keys", "--descriptor-expires", "1d") == 0
    stage.await_version(2)
    stage.now_seconds += 6 * 3600.0
    stage.run(60.0)
    device, leap = stage.devices[0], 20 * 3600.0
    device.kill()  # it starts under a clock that leaps later
    clock, next_seconds = device._clock, device.next_seconds
    leapt = [0.0]
    device._clock = lambda: clock() + leapt[0]
    device.next_seconds = lambda: next_seconds() - leapt[0]  # type: ignore[method-assign]
    device.start()
    stage.run(100.0)
    leapt[0] = leap


def test_a_calendar_that_wanders_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    seconds, problems = 0.0, set[str]()
    clock = SteadyClock(lambda: seconds, lambda: 1e9 + 1.5 * seconds)
    for _ in range(3600):
        seconds += 1.0
        clock.look(1e12)
        problems.add(clock.problem)
    assert 30 <= len(caplog.messages) <= 61 and len(problems) <= 62
