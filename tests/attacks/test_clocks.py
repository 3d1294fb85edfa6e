"""The aggregator's calendar may say what it likes: a verdict never turns into another."""

from __future__ import annotations

import os

import pytest

from aggregator.keys.enrolment import make_codes
from aggregator.store import Database
from device_sdk.enrol import trust
from device_sdk.home.home import Home
from device_sdk.wire.publish.receipts import RecordType
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import Parcel
from tests.attacks.stage import Stage

_DAY_SECONDS = 86_400.0
_HOUSEKEEPING_SECONDS = 120.0


def _first_receipt_lost(make_stage: MakeStage) -> Stage:
    """A stage on which device 0 was counted in round 1, does not know it, and is switched off."""
    stage = make_stage()
    stage.drop = lambda parcel: (
        parcel.to == "device-0" and parcel.payload[1:2] == bytes([RecordType.RECEIPT])
    )
    stage.run_until(lambda: stage.parts.first.aggregation.version == 1)
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
    stage.run_until(lambda: stage.parts.first.aggregation.version == 1)  # all have their sessions
    stage.offset_seconds = 100 * _DAY_SECONDS
    stage.run_until(lambda: stage.parts.first.aggregation.version == 2)
    assert stage.parts.first.rounds.current is None
    stage.offset_seconds = 0.0
    stage.run_until(lambda: stage.parts.first.aggregation.version == 4, 60.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_round_ends_though_the_clock_was_ahead_when_it_opened(
    make_stage: MakeStage, restarted: bool
) -> None:
    stage = make_stage(
        round_lines="quorum = 2\ndeadline_seconds = 60\nleast_deadline_seconds = 60\n"
        "pause_seconds = 5"
    )
    stage.run_until(lambda: stage.parts.first.aggregation.version == 1)
    stage.devices[2].kill()
    stage.offset_seconds = 100 * _DAY_SECONDS
    stage.run_until(lambda: stage.parts.first.rounds.arrived == 2)
    stage.offset_seconds = 0.0
    if restarted:
        stage.kill_aggregator()
        stage.start_aggregator()
    stage.run(50.0)
    assert stage.parts.first.aggregation.version == 1
    stage.run_until(lambda: stage.parts.first.aggregation.version == 2, 60.0)


def test_devices_that_were_told_a_time_far_ahead_come_back_by_a_code(
    make_stage: MakeStage,
) -> None:
    stage = make_stage()
    stage.offset_seconds = 100 * _DAY_SECONDS
    stage.run_until(lambda: stage.parts.first.aggregation.version == 1)
    stage.offset_seconds = 0.0
    stage.run(100.0)
    assert stage.parts.first.aggregation.version == 1
    assert stage.devices[0].participant.refusals.counts()["expired-manifest"] >= 1
    for device in stage.devices:
        device.kill()
        [code] = make_codes(stage.store, 1, int(stage.unix()), os.urandom)
        home = Home(device.folder)
        trust(home, code.to_text(), set_clock_back=True)
        home.close()
        device.start()
    stage.run_until(lambda: stage.parts.first.aggregation.version == 3)


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
    stage.kill_aggregator()
    stage.start_aggregator()
    assert _told(stage) == "forgotten"
