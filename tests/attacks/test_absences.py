"""Somebody is away for long, and comes back: everything goes on without help."""

from __future__ import annotations

from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.world import Pace
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import ROUND_SECONDS, Stage

_DAY = 86_400.0
_ROUND = "quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 60\npause_seconds = 5"
_SLOW = "quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 14400\npause_seconds = 14400"


def _broker_away(stage: Stage, seconds: float) -> None:
    stage.link.disconnect()
    for device in stage.devices:
        device.set_connected(False)
    stage.broker.restart()
    stage.run(seconds)
    stage.link.connect()
    for device in stage.devices:
        device.set_connected(True)


def test_the_broker_away_for_the_length_of_three_rounds(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_ROUND)
    stage.await_version(stage.version + 2, 1200.0)
    counted = stage.parts.first.ingest.counted
    _broker_away(stage, 3 * ROUND_SECONDS)
    assert stage.parts.first.ingest.counted == counted
    before = stage.now_seconds
    stage.await_version(stage.version + 2, 1200.0)
    assert stage.now_seconds - before < 3 * ROUND_SECONDS


def test_a_broker_that_forgot_everything_is_told_of_the_open_round(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_SLOW)
    late = stage.devices[2]
    late.set_connected(False)
    stage.run_until(lambda: stage.verdict(0, 1) == stage.verdict(1, 1) == "counted", 60)
    stage.link.disconnect()
    stage.broker.restart()
    stage.link.connect()
    late.set_connected(True)
    stage.run(60.0)  # of the round's four hours
    assert stage.verdict(2, 1) == "counted"


def test_what_is_trained_between_a_restart_s_list_and_the_new_session_is_reported(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(pace=Pace(reopen_seconds=50.0))
    stage.await_version(1)
    stage.restart_aggregator()
    # Nor is it told that its session is lost, which would shorten that wait.
    stage.drop = lambda parcel: parcel.payload[1:2] == bytes([MessageType.NO_SESSION])
    trained = [device.jobs for device in stage.devices]
    opened = [device.participant.sessions.opened for device in stage.devices]
    # The pause between rounds is shorter than the wait of a fleet that is to come one by one.
    stage.run_until(lambda: any(d.jobs > n for d, n in zip(stage.devices, trained, strict=True)))
    early = [
        device
        for device, jobs, sessions in zip(stage.devices, trained, opened, strict=True)
        if device.jobs > jobs and device.participant.sessions.opened == sessions
    ]
    assert early, "nobody trained under the session of the aggregator's last life"
    assert all(row.report for device in early for row in device.home.rounds.outbox())
    stage.await_version(2)
    assert [stage.sent_up(place, RecordType.UPDATE) for place in range(3)] == [[], [], []]
    told = stage.parts.store.first.reports.outcomes()
    assert [(each.round, each.outcome, each.devices) for each in told] == [
        (2, "trained", 3),
        (1, "trained", 3),
    ]


def test_the_aggregator_away_for_a_day(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_ROUND)
    stage.await_version(stage.version + 2, 1200.0)
    stage.kill_aggregator()
    stage.run(_DAY)
    stage.start_aggregator()
    stage.await_version(stage.version + 3, 1200.0)
    assert [stage.parts.store.first.rounds.latest()[0].expected] == [3]


def test_the_aggregator_asks_little_of_the_network_while_it_is_away(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(round_lines=_ROUND)
    stage.await_version(stage.version + 1, 1200.0)
    stage.kill_aggregator()
    seen = len(stage.broker.seen)
    stage.run(_DAY)
    messages = len(stage.broker.seen) - seen
    # An update with growing waits of up to ten minutes, an open in the same way: full jitter.
    assert messages / 3 < 2 * _DAY / 300


def test_a_device_back_after_a_week(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines=_SLOW, pace=Pace(most_seconds=3600.0))
    stage.idle_seconds = 1800.0
    stage.await_version(stage.version + 1, 2 * _DAY)
    device = stage.devices[0]
    device.set_connected(False)
    waiting = device.home.rounds.outbox_size()
    # Others go on: 28 rounds or so.
    stage.run(7 * _DAY)
    assert stage.version >= 10
    device.set_connected(True)
    number = stage.parts.store.first.rounds.latest()[0].round
    stage.run_until(
        lambda: any(stage.verdict(0, n) == "counted" for n in range(number, number + 3)), _DAY
    )
    assert waiting[0] <= 1 and device.home.rounds.outbox_size()[0] == 0


def test_a_device_switched_off_for_a_week_with_an_update_in_its_outbox(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(round_lines=_SLOW, pace=Pace(most_seconds=3600.0))
    stage.idle_seconds = 1800.0
    stage.drop = lambda parcel: parcel.topic == stage.up_topic(0) and parcel.payload[1] == 18
    stage.run_until(lambda: stage.devices[0].home.rounds.outbox_size()[0] == 1, _DAY)
    stage.devices[0].kill()
    stage.run(7 * _DAY)
    stage.drop = lambda parcel: False
    stage.devices[0].start()
    stage.run_until(lambda: stage.verdict(0, 1) is not None, _DAY)
    assert stage.verdict(0, 1) == "late"
    number = stage.parts.store.first.rounds.latest()[0].round
    stage.run_until(
        lambda: any(stage.verdict(0, n) == "counted" for n in range(number, number + 3)), _DAY
    )
