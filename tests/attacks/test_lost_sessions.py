"""Sessions that the aggregator lost: it says so, and nobody else can."""

from __future__ import annotations

import itertools
import os

import pytest

from aggregator.serve.uplink import Refusal
from device_sdk.link.events import Message
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import DownTopic, UpTopic
from device_sdk.wire.seal.admission import _MARGIN, OpenSchedule
from device_sdk.wire.seal.handshake import read_no_session, sign_no_session
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import Stage
from tests.fakes.parties import key_from

OPEN, DENIAL, UPDATE = MessageType.SESSION_OPEN, MessageType.NO_SESSION, RecordType.CONTRIBUTION
HOUR = 3600.0


def lose(stage: Stage, place: int = 0) -> None:
    """The aggregator forgets a device's sessions, as it does where a worker dies."""
    stage.parts.table.end(stage.devices[place].grant.device_id)


def down(stage: Stage, place: int) -> str:
    return stage.topics.write(DownTopic(stage.devices[place].grant.handle))


def denials(stage: Stage) -> list[bytes]:
    return [payload for _, payload in stage.broker.seen if payload[1:2] == bytes([DENIAL])]


def opened(stage: Stage) -> list[int]:
    return [device.participant.sessions.opened for device in stage.devices]


def session_of(stage: Stage, place: int) -> bytes:
    return stage.sent_up(place, UPDATE)[-1][4:12]


def await_word(stage: Stage) -> None:
    """Until device 0 has sent its next update."""
    sent = len(stage.sent_up(0, UPDATE))
    while len(stage.sent_up(0, UPDATE)) == sent:
        stage.run(0.05)


def denied(stage: Stage) -> bytes:
    """Device 0's session is lost, it is told so, and has another."""
    lose(stage)
    await_word(stage)
    stage.run(2.0)
    assert opened(stage) == [2, 1, 1] and len(denials(stage)) == 1
    return denials(stage)[0]


def forged(stage: Stage, place: int, **changed: object) -> bytes:
    """What the aggregator would say of a device's session in use, but for what is changed."""
    keys = stage.parts.keys.current()
    said = {
        "session_id": session_of(stage, place),
        "incarnation": stage.incarnation(),
        "handle": stage.devices[place].grant.handle,
        "descriptor": keys.descriptor,
        "sessions": keys.sessions,
        **changed,
    }
    return sign_no_session(**said)  # type: ignore[arg-type]


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_session_costs_a_round_trip_where_the_device_is_told(
    make_stage: MakeStage, told: bool
) -> None:
    stage = make_stage(round_lines="quorum = 3\ndeadline_seconds = 120\npause_seconds = 5")
    stage.await_version(1)
    if not told:
        stage.drop = lambda parcel: parcel.payload[1:2] == bytes([DENIAL])
    lose(stage)
    await_word(stage)
    said = stage.now_seconds
    while stage.devices[0].home.rounds.outbox_size()[0] > 0:
        stage.run(0.05)
    seconds = stage.now_seconds - said
    assert opened(stage) == [2, 1, 1]
    assert seconds <= 1.1 if told else seconds > 20


def test_an_aggregator_that_restarts_denies_the_sessions_of_its_last_life(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(round_lines="quorum = 3\ndeadline_seconds = 120\npause_seconds = 5")
    stage.await_version(1)
    stage.restart_aggregator()
    await_word(stage)
    stage.await_version(2, 20.0)
    assert opened(stage) == [2, 2, 2]
    lives = {read_no_session(each).incarnation for each in denials(stage)}
    assert lives <= {stage.incarnation()}


def test_a_denial_of_a_session_of_before_is_ignored(stage: Stage) -> None:
    old = denied(stage)
    for _ in range(50):
        stage.broker.publish(down(stage, 0), old)
        stage.run(1.0)
    assert opened(stage) == [2, 1, 1]
    assert stage.refused(0) == {"unknown-session": 50}


def test_a_denial_for_another_device_is_ignored(stage: Stage) -> None:
    mine = denied(stage)
    stage.broker.publish(down(stage, 1), mine)
    # Even if the aggregator could be brought to deny its session, on the first one's topic.
    handle = stage.devices[0].grant.handle
    stage.broker.publish(down(stage, 1), forged(stage, 1, handle=handle))
    stage.run(60.0)
    assert opened(stage) == [2, 1, 1]
    assert stage.refused(1) == {"unknown-session": 1, "bad-signature": 1}


def test_a_denial_that_the_aggregator_did_not_sign_is_ignored(stage: Stage) -> None:
    right = forged(stage, 0)
    unsigned = right[:-64] + bytes(64)
    thief = forged(stage, 0, sessions=key_from("a thief"))
    other = forged(stage, 0, sessions=stage.parts.keys.current().signing)
    for message in (unsigned, thief, other, right[:-1], right + b"\x00"):
        stage.broker.publish(down(stage, 0), message)
    stage.run(60.0)
    assert opened(stage) == [1, 1, 1]
    assert stage.refused(0) == {"bad-signature": 3, "truncated": 1, "too-large": 1}


def test_a_denial_by_a_life_that_is_over_is_ignored(stage: Stage) -> None:
    stage.broker.publish(down(stage, 0), forged(stage, 0, incarnation=os.urandom(16)))
    stage.run(60.0)
    assert opened(stage) == [1, 1, 1] and stage.refused(0) == {"old-incarnation": 1}


def test_envelopes_of_made_up_sessions_cost_few_signatures_and_no_session(stage: Stage) -> None:
    envelope = stage.sent_up(0, UPDATE)[-1]
    for _ in range(100):
        for _ in range(30):
            made_up = envelope[:4] + os.urandom(8) + envelope[12:]
            stage.broker.publish(stage.up_topic(0), made_up)
        stage.run(1.0)
    assert stage.refusals("unknown-session") >= 3000
    assert len(denials(stage)) <= 1 + 0.5 * 100
    assert opened(stage) == [1, 1, 1]
    assert stage.refused(0).keys() == {"unknown-session"}


def test_an_aggregator_that_loses_every_session_is_not_pestered(make_stage: MakeStage) -> None:
    stage = make_stage(
        round_lines="quorum = 1\ndeadline_seconds = 14400\npause_seconds = 5", devices=1
    )
    stage.run_until(lambda: stage.parts.first.rounds.current is not None)
    device, told = stage.devices[0], 0
    until = stage.now_seconds + 6 * HOUR
    counted = stage.parts.first.ingest.counted
    stage.drop = lambda parcel: parcel.payload[1:2] == bytes([RecordType.RECEIPT])
    while stage.now_seconds < until:
        if device.participant.sessions.opened > told:
            told = device.participant.sessions.opened
            lose(stage)
        stage.run(2.0)
    assert len(stage.sent_up(0, OPEN)) <= 150, "about one in five minutes"
    stage.drop = lambda parcel: False
    stage.run(1300.0)
    assert stage.parts.first.ingest.counted > counted
    assert device.home.rounds.outbox_size()[0] == 0


def test_what_is_put_on_another_shard_is_not_denied(stage: Stage) -> None:
    """In a cluster another worker hears it, which holds no session of the device."""
    lose(stage)
    grant = stage.devices[0].grant
    envelope = stage.sent_up(0, UPDATE)[-1]
    for shard, reason in ((grant.shard ^ 1, "wrong-topic"), (grant.shard, "unknown-session")):
        topic = stage.topics.write(UpTopic(shard, grant.handle))
        result = stage.parts.uplink.receive(Message(topic, envelope, False))
        assert isinstance(result, Refusal) and result.error.reason == reason
        assert (result.answer is not None) == (shard == grant.shard)


def lose_all(stage: Stage, place_seconds: float) -> float:
    """In the middle of a round no session is open any more, and opens are dear from now on: each
    takes so long. When the first device says something."""
    stage.await_version(1)
    for place in range(len(stage.devices)):
        lose(stage, place)
    schedule = stage.parts.table._schedule
    schedule._cost_seconds = place_seconds * schedule._share / _MARGIN
    schedule.opened = lambda sender, cost_seconds: (  # type: ignore[method-assign]
        OpenSchedule.opened(schedule, sender, schedule._cost_seconds)
    )
    said = len(denials(stage))
    stage.run_until(lambda: len(denials(stage)) > said)
    return stage.now_seconds


def opened_again(stage: Stage, since_seconds: float) -> list[float]:
    """After how many seconds each device had its second session, in the order of time."""
    seen: dict[int, float] = {}
    while len(seen) < len(stage.devices):
        stage.run(0.1)
        for place, count in enumerate(opened(stage)):
            if count == 2:
                seen.setdefault(place, stage.now_seconds - since_seconds)
    return sorted(seen.values())


def test_sessions_that_are_lost_together_are_opened_one_after_the_other(
    make_stage: MakeStage,
) -> None:
    rounds = "quorum = 8\ndeadline_seconds = 600\npause_seconds = 5"
    stage = make_stage(devices=8, round_lines=rounds)
    moments = opened_again(stage, lose_all(stage, 5.0))
    assert moments[0] < 1.5, "the first one waits for nobody"
    gaps = [later - sooner for sooner, later in itertools.pairwise(moments)]
    assert all(3.5 <= gap <= 6.5 for gap in gaps), "but for up to a second of each device's own"
    stage.await_version(2)
    assert stage.parts.first.ingest.counted == 16


def test_no_device_waits_beyond_the_end_of_its_round(make_stage: MakeStage) -> None:
    rounds = "quorum = 8\ndeadline_seconds = 40\npause_seconds = 5"
    stage = make_stage(devices=8, round_lines=rounds)
    moments = opened_again(stage, lose_all(stage, 100.0))
    assert moments[-1] < 40 / 2 + 1
    stage.await_version(2, 40.0)
    assert stage.parts.first.ingest.counted == 16
