"""Messages that come again, or at another place: nothing changes, and nobody is evicted."""

from __future__ import annotations

import os
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.invitation import make_codes
from aggregator.uplink import Answer, Refusal
from device_sdk.wire.enrolment import EnrolmentAttempt
from device_sdk.wire.enrolment_code import EnrolmentCode
from device_sdk.wire.errors import WireError
from device_sdk.wire.header import MessageType
from device_sdk.wire.link_events import Message
from device_sdk.wire.messages import RecordType
from device_sdk.wire.topics import DownTopic, EnrolRequestTopic
from tests.attacks.stage import Stage

UPDATE, OPEN = RecordType.UPDATE, MessageType.SESSION_OPEN


def test_every_uplink_message_replayed_within_its_session(stage: Stage) -> None:
    counted, before = stage.parts.ingest.counted, stage.parts.aggregation.state()
    messages = [(stage.up_topic(place), m) for place in range(3) for m in stage.sent_up(place)]
    for topic, message in messages * 3:
        stage.broker.publish(topic, message)
    stage.settle()
    assert stage.parts.ingest.counted == counted
    after = stage.parts.aggregation.state()
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
    # Opens come as often; one whose session was used is refused as replayed, too.
    assert stage.refusals("replayed") == 3 * len(messages)


def test_every_uplink_message_replayed_across_sessions(stage: Stage) -> None:
    messages = [(stage.up_topic(place), m) for place in range(3) for m in stage.sent_up(place)]
    stage.kill_aggregator()
    stage.start_aggregator()
    for topic, message in messages:
        stage.broker.publish(topic, message)
    version = stage.parts.aggregation.version
    stage.settle()
    assert stage.parts.ingest.counted == 0
    assert stage.refusals("unknown-session") >= sum(m[1] == UPDATE for _, m in messages) > 0
    stage.run_until(lambda: stage.parts.aggregation.version > version)


def test_a_device_s_message_moved_to_another_device_s_topic(stage: Stage) -> None:
    stage.drop = lambda parcel: parcel.topic == stage.up_topic(0) and parcel.payload[1] == UPDATE
    sent = len(stage.sent_up(0, UPDATE))
    stage.run_until(lambda: len(stage.sent_up(0, UPDATE)) > sent)
    counted = stage.parts.ingest.counted
    stage.broker.publish(stage.up_topic(1), stage.sent_up(0, UPDATE)[-1])
    stage.settle()
    assert stage.refusals("wrong-topic") == 1
    assert stage.parts.ingest.counted == counted
    # The session did not suffer: the same envelope is taken at its own place.
    stage.drop = lambda parcel: False
    stage.broker.publish(stage.up_topic(0), stage.sent_up(0, UPDATE)[-1])
    stage.settle()
    assert stage.parts.ingest.counted == counted + 1


def test_a_receipt_sent_back_up_and_an_update_sent_down(stage: Stage) -> None:
    down = stage.topics.write(DownTopic(stage.devices[0].grant.handle))
    receipts = [m for at, m in stage.broker.seen if at == down and m[1] == RecordType.RECEIPT]
    stage.broker.publish(stage.up_topic(0), receipts[-1])
    stage.broker.publish(down, stage.sent_up(0, UPDATE)[-1])
    stage.settle()
    assert stage.refusals("bad-tag") == 1
    assert stage.devices[0].participant.refusals.counts() == {"bad-tag": 1}


def test_a_receipt_moved_to_another_device(stage: Stage) -> None:
    mine, theirs = (stage.topics.write(DownTopic(d.grant.handle)) for d in stage.devices[:2])
    stage.drop = lambda parcel: parcel.topic == theirs
    stage.run(30.0)
    receipts = [m for at, m in stage.broker.seen if at == mine and m[1] == RecordType.RECEIPT]
    waiting = stage.devices[1].home.rounds.outbox_size()[0]
    stage.drop = lambda parcel: False
    stage.broker.publish(theirs, receipts[-1])
    stage.settle()
    assert stage.devices[1].participant.refusals.counts().get("unknown-session") == 1
    assert stage.devices[1].home.rounds.outbox_size()[0] == waiting > 0


def test_an_update_of_an_old_round_moved_into_the_next(stage: Stage) -> None:
    # The round is in the sealed bytes: an old body in a new round would need the device's session.
    old = stage.sent_up(0, UPDATE)[0]
    stage.run_until(lambda: stage.parts.aggregation.version == 2)
    counted = stage.parts.ingest.counted
    stage.broker.publish(stage.up_topic(0), old)
    stage.settle()
    assert (stage.parts.ingest.counted, stage.refusals("replayed")) == (counted, 1)


def test_a_replayed_open_evicts_nobody(stage: Stage) -> None:
    device_id = stage.devices[0].grant.device_id
    opened = stage.devices[0].participant.sessions.opened
    for message in stage.sent_up(0, OPEN) * 50:
        stage.broker.publish(stage.up_topic(0), message)
    stage.settle()
    assert stage.parts.table.has_session(device_id)
    stage.run_until(lambda: stage.parts.aggregation.version == 3)
    assert stage.devices[0].participant.sessions.opened == opened == 1


def test_an_open_replayed_after_the_aggregator_s_restart_evicts_nobody(stage: Stage) -> None:
    old = stage.sent_up(0, OPEN)
    stage.kill_aggregator()
    stage.start_aggregator()
    stage.run_until(lambda: stage.parts.aggregation.version == 2)
    opened = stage.devices[0].participant.sessions.opened
    for message in old * 10:
        stage.broker.publish(stage.up_topic(0), message)
    stage.settle()
    assert len(stage.parts.table) <= 3 + len(old)
    stage.run_until(lambda: stage.parts.aggregation.version == 4)
    assert stage.devices[0].participant.sessions.opened == opened


def test_retained_uplinks_are_refused(stage: Stage) -> None:
    stage.kill_aggregator()
    for place in range(3):
        for message in stage.sent_up(place):
            stage.broker.publish(stage.up_topic(place), message, retain=True)
    enrol = stage.topics.write(EnrolRequestTopic())
    stage.broker.publish(enrol, os.urandom(600), retain=True)
    stage.start_aggregator()
    stage.settle()
    assert stage.refusals("retained") == 4  # one topic each, the newest message
    assert len(stage.parts.table) == 0
    stage.run_until(lambda: stage.parts.aggregation.version == 2)


def _attempt(stage: Stage, code: EnrolmentCode, key: Ed25519PrivateKey) -> EnrolmentAttempt:
    return EnrolmentAttempt(code, stage.parts.keys.current().descriptor, key)


def _ask(stage: Stage, message: bytes) -> bytes:
    topic = stage.topics.write(EnrolRequestTopic())
    answer = stage.parts.uplink.receive(Message(topic, message, False))
    assert isinstance(answer, Answer), answer
    return answer.payload


def _invite(stage: Stage) -> EnrolmentCode:
    now = int(stage.unix())
    [code] = make_codes(stage.store, 1, now, os.urandom)
    with stage.store.database.transaction():
        stage.store.tokens.add(code, now, now + 3600, None)
    return code


def test_a_replayed_enrolment_makes_no_second_device(stage: Stage) -> None:
    attempt = _attempt(stage, _invite(stage), Ed25519PrivateKey.generate())
    grant = attempt.accept(_ask(stage, attempt.message)).grant
    assert len(stage.parts.registry) == 4
    for _ in range(10):
        assert attempt.accept(_ask(stage, attempt.message)).grant == grant
    assert len(stage.parts.registry) == 4


def test_a_stolen_code_used_twice_is_refused_and_shown(stage: Stage) -> None:
    code = _invite(stage)
    owner = _attempt(stage, code, Ed25519PrivateKey.generate())
    owner.accept(_ask(stage, owner.message))
    thief = _attempt(stage, code, Ed25519PrivateKey.generate())
    try:
        thief.accept(_ask(stage, thief.message))
        raise AssertionError("the thief was let in")
    except WireError as error:
        assert error.reason == "code-used"
    row = stage.store.tokens.find(code.token_id)
    assert row is not None and row.strangers == 1
    assert len(stage.parts.registry) == 4


def test_enrolment_messages_without_the_code_s_secret_cost_no_public_key_work(
    stage: Stage,
) -> None:
    code = _invite(stage)
    forged = replace(code, secret=os.urandom(16))
    attempt = _attempt(stage, forged, Ed25519PrivateKey.generate())
    topic = stage.topics.write(EnrolRequestTopic())
    refused = stage.parts.uplink.receive(Message(topic, attempt.message, False))
    assert isinstance(refused, Refusal) and refused.error.reason == "bad-admission"
