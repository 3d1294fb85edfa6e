"""Messages that come again, or at another place: nothing changes, and nobody is evicted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.keys.enrolment import make_codes
from aggregator.serve.uplink import Answer, Refusal
from aggregator.task.file import read_task
from device_sdk.link.events import Message
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MessageType
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.topics import DownTopic, EnrolRequestTopic, PresenceTopic
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.enrolment import EnrolmentAttempt
from device_sdk.wire.seal.enrolment_message import EnrolmentCode
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.session_table import MOST_REPEATS
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import Parcel
from tests.attacks.stage import Stage
from tests.fakes.parties import CountingHpke

UPDATE, OPEN = RecordType.CONTRIBUTION, MessageType.SESSION_OPEN


def test_every_uplink_message_replayed_within_its_session(stage: Stage) -> None:
    counted, before = stage.parts.first.ingest.counted, stage.parts.first.aggregation.state()
    messages = [(stage.up_topic(place), m) for place in range(3) for m in stage.sent_up(place)]
    for topic, message in messages * 3:
        stage.broker.publish(topic, message)
    stage.settle()
    assert stage.parts.first.ingest.counted == counted
    after = stage.parts.first.aggregation.state()
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
    # Opens come as often; one whose session was used is refused as replayed, too.
    assert stage.refusals("replayed") == 3 * len(messages)


def test_every_uplink_message_replayed_across_sessions(stage: Stage) -> None:
    messages = [(stage.up_topic(place), m) for place in range(3) for m in stage.sent_up(place)]
    stage.restart_aggregator()
    for topic, message in messages:
        stage.broker.publish(topic, message)
    version = stage.version
    stage.settle()
    assert stage.parts.first.ingest.counted == 0
    assert stage.refusals("unknown-session") >= sum(m[1] == UPDATE for _, m in messages) > 0
    stage.run_until(lambda: stage.version > version)


def test_a_device_s_message_moved_to_another_device_s_topic(stage: Stage) -> None:
    stage.drop = lambda parcel: parcel.topic == stage.up_topic(0) and parcel.payload[1] == UPDATE
    sent = len(stage.sent_up(0, UPDATE))
    stage.run_until(lambda: len(stage.sent_up(0, UPDATE)) > sent)
    counted = stage.parts.first.ingest.counted
    stage.broker.publish(stage.up_topic(1), stage.sent_up(0, UPDATE)[-1])
    stage.settle()
    assert stage.refusals("wrong-topic") == 1
    assert stage.parts.first.ingest.counted == counted
    # The session did not suffer: the same envelope is taken at its own place.
    stage.drop = lambda parcel: False
    stage.broker.publish(stage.up_topic(0), stage.sent_up(0, UPDATE)[-1])
    stage.settle()
    assert stage.parts.first.ingest.counted == counted + 1


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
    stage.await_version(2)
    counted = stage.parts.first.ingest.counted
    stage.broker.publish(stage.up_topic(0), old)
    stage.settle()
    assert (stage.parts.first.ingest.counted, stage.refusals("replayed")) == (counted, 1)


def test_a_replayed_open_evicts_nobody(stage: Stage) -> None:
    device_id = stage.devices[0].grant.device_id
    opened = stage.devices[0].participant.sessions.opened
    for message in stage.sent_up(0, OPEN) * 50:
        stage.broker.publish(stage.up_topic(0), message)
    stage.settle()
    assert stage.parts.table.has_session(device_id)
    stage.await_version(3)
    assert stage.devices[0].participant.sessions.opened == opened == 1


def test_an_open_replayed_after_the_aggregator_s_restart_evicts_nobody(stage: Stage) -> None:
    old = stage.sent_up(0, OPEN)
    stage.restart_aggregator()
    stage.await_version(2)
    opened = stage.devices[0].participant.sessions.opened
    for message in old * 10:
        stage.broker.publish(stage.up_topic(0), message)
    stage.settle()
    assert len(stage.parts.table) <= 3 + len(old)
    stage.await_version(4)
    assert stage.devices[0].participant.sessions.opened == opened


def _count_unsealing(stage: Stage) -> CountingHpke:
    """Counts what the aggregator's present life unseals from now on, of opens and enrolments."""
    counting = CountingHpke()
    parts = stage.parts
    parts.table._unseal = parts.uplink._enrolment.desk._unseal = counting.unseal
    return counting


def _record_opens(stage: Stage, count: int) -> list[bytes]:
    """What a listener has of device 0 after ``count`` restarts of its process, oldest first."""
    device = stage.devices[0]
    for _ in range(count):
        device.restart()
        stage.run_until(lambda: device.participant.sessions.opened == 1)
        stage.run(6.0)  # a little longer than the admission takes to make up for one
    return list(dict.fromkeys(stage.sent_up(0, OPEN)))


def test_a_hundred_recorded_opens_replayed_within_a_life_cost_an_hmac_each(stage: Stage) -> None:
    recorded, sessions = _record_opens(stage, 100), len(stage.parts.table)
    assert len(recorded) > 100
    counting, before = _count_unsealing(stage), stage.refusals("replayed")
    for message in recorded * 3:
        answer = stage.parts.uplink.receive(Message(stage.up_topic(0), message, False))
        assert isinstance(answer, Refusal) and answer.error.reason == "replayed"
        stage.parts.refusals.note(answer.error)
    assert (counting.unseals, len(stage.parts.table)) == (0, sessions)
    assert stage.refusals("replayed") == before + 3 * len(recorded)
    # Nobody was charged for it: the device opens as many sessions as it could before.
    device = stage.devices[0]
    for _ in range(5):
        device.restart()
        stage.run_until(lambda: device.participant.sessions.opened == 1, seconds=30)
    assert stage.refusals("too-many") == 0


def test_opens_recorded_before_a_restart_shut_nobody_out_after_it(stage: Stage) -> None:
    recorded = _record_opens(stage, 60)
    stage.restart_aggregator()
    counting = _count_unsealing(stage)
    for message in recorded[:20]:
        stage.broker.publish(stage.up_topic(0), message)
    stage.settle()
    assert counting.unseals == 0
    device, other = stage.devices[:2]
    device.restart()
    trained, others, until = device.jobs, other.jobs, stage.now_seconds + 700.0
    place = 0
    while stage.now_seconds < until:
        stage.broker.publish(stage.up_topic(0), recorded[place % len(recorded)])
        place += 1
        stage.run(5.0)
    assert device.participant.sessions.opened == 1
    assert stage.refusals("too-many") == 0
    assert counting.unseals <= 2 * len(stage.devices)
    assert device.jobs - trained >= other.jobs - others - 1 > 10


def test_a_reply_that_is_lost_is_sent_again_and_no_more_than_a_few_times(stage: Stage) -> None:
    device, down = stage.devices[0], stage.topics.write(DownTopic(stage.devices[0].grant.handle))
    lost = 0

    def lose(parcel: Parcel) -> bool:
        nonlocal lost
        is_reply = parcel.topic == down and parcel.payload[1] == MessageType.SESSION_REPLY
        lost += is_reply
        return is_reply and lost <= 2

    stage.drop = lose
    device.restart()
    counting = _count_unsealing(stage)
    opens = len(stage.sent_up(0, OPEN))
    stage.run_until(lambda: device.participant.sessions.opened == 1, seconds=120)
    sent = stage.sent_up(0, OPEN)[opens:]
    assert len(sent) == 3 and len(set(sent)) == 1 and counting.unseals == 1
    # A broker that doubles packets, and then somebody who goes on.
    replies = lost
    for _ in range(100):
        stage.broker.publish(stage.up_topic(0), sent[0])
    stage.settle()
    assert lost - replies <= MOST_REPEATS and counting.unseals == 1


def test_a_home_from_a_backup_opens_again_in_the_same_life(make_stage: MakeStage) -> None:
    stage = make_stage(judged=False)  # what the device knew of its rounds is gone
    device = stage.devices[0]
    stage.run(5.0)
    device.kill()
    backup = device.folder.with_name("backup")
    shutil.copytree(device.folder, backup)
    device.start()
    _record_opens(stage, 40)
    # Somebody swallowed the replies for an hour, too.
    down = stage.topics.write(DownTopic(device.grant.handle))
    stage.drop = lambda parcel: parcel.topic == down
    device.restart()
    stage.run(3600.0)
    stage.drop = lambda parcel: False
    unanswered = device.participant.sessions._attempts
    device.kill()
    shutil.rmtree(device.folder)
    shutil.copytree(backup, device.folder)
    counting = _count_unsealing(stage)
    device.start()
    opens = len(stage.sent_up(0, OPEN))
    stage.run_until(lambda: device.participant.sessions.opened == 1, seconds=6 * 3600)
    attempts = len(set(stage.sent_up(0, OPEN)[opens:]))
    assert attempts <= unanswered + 9
    assert counting.unseals <= 5  # the others' renewals among them
    stage.next_version()


def test_a_device_that_starts_while_an_old_presence_is_shown_is_not_shut_out(stage: Stage) -> None:
    topic = stage.topics.write(PresenceTopic())
    old = stage.broker.retained[topic]
    stage.kill_aggregator()
    stage.now_seconds += 10.0
    stage.start_aggregator()
    stage.next_version()
    stage.run(120.0)
    stage.broker.publish(topic, old, retain=True)
    device = stage.devices[0]
    device.restart()
    stage.run_until(lambda: device.participant.sessions.opened == 1, seconds=120)
    assert stage.refusals("old-incarnation") >= 1
    assert stage.broker.retained[topic] != old  # the aggregator has shown itself again
    # Shown on and on, it costs no session, and no open but the one.
    device.restart()
    opens, until = len(stage.sent_up(0, OPEN)), stage.now_seconds + 600.0
    while stage.now_seconds < until:
        stage.broker.publish(topic, old, retain=True)
        stage.run(7.0)
    assert device.participant.sessions.opened == 1
    assert len(set(stage.sent_up(0, OPEN)[opens:])) <= 3


def test_an_aggregator_whose_clock_was_set_back_before_its_start_is_found(stage: Stage) -> None:
    stage.kill_aggregator()
    stage.offset_seconds = -30.0
    stage.start_aggregator()
    before = [device.jobs for device in stage.devices]
    stage.run(900.0)
    assert all(device.participant.sessions.opened >= 2 for device in stage.devices)
    device = stage.devices[0]
    device.restart()
    stage.run_until(lambda: device.participant.sessions.opened == 1, seconds=60)
    assert [each.jobs for each in stage.devices] >= before


def test_devices_that_open_while_the_aggregator_restarts_find_the_new_life(stage: Stage) -> None:
    for _ in range(5):
        for device in stage.devices:
            device.kill()
        stage.drop = lambda parcel: parcel.payload[1:2] == bytes((OPEN,))
        for device in stage.devices:
            device.start()
        stage.run(4.0)
        stage.restart_aggregator()
        stage.drop = lambda parcel: False
        for device in stage.devices:
            stage.run_until(lambda d=device: d.participant.sessions.opened >= 1, seconds=60)  # type: ignore[misc]
    stage.next_version()


def test_public_key_work_is_held_to_its_share_and_devices_come_back(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.run(30.0)
    stage.restart_aggregator()
    # Each unsealing takes longer than a second of this machine's time.
    table, slow = stage.parts.table, CountingHpke()

    def unseal(key: hpke.PrivateKey, info: bytes, sealed: bytes) -> bytes:
        stage.now_seconds += 2.0
        return slow.unseal(key, info, sealed)

    table._unseal = unseal
    began = stage.now_seconds
    stage.run_until(lambda: all(d.participant.sessions.opened == 2 for d in stage.devices))
    assert stage.refusals("busy") > 0 and stage.refusals("too-many") == 0
    share = read_task(stage.fleet.aggregator.task_file).fleet.admission.opens_share
    worked = 2.0 * slow.unseals
    assert worked <= share * (stage.now_seconds - began) + 1.0 + 2.0
    stage.next_version()


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
    stage.await_version(2)


def _attempt(
    stage: Stage, code: EnrolmentCode, key: Ed25519PrivateKey, counter: int = 1
) -> EnrolmentAttempt:
    descriptor = stage.parts.keys.current().descriptor
    return EnrolmentAttempt(code, descriptor, key, Freshness(stage.incarnation(), counter))


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


def _refusal(stage: Stage, message: bytes) -> str:
    refused = stage.parts.uplink.receive(
        Message(stage.topics.write(EnrolRequestTopic()), message, False)
    )
    assert isinstance(refused, Refusal), refused
    return refused.error.reason


def test_a_replayed_enrolment_makes_no_second_device_and_costs_an_hmac(stage: Stage) -> None:
    code, key = _invite(stage), Ed25519PrivateKey.generate()
    attempt = _attempt(stage, code, key)
    grant = attempt.accept(_ask(stage, attempt.message)).grant
    # The answer was lost: the same identity asks again, in words of its own.
    again = _attempt(stage, code, key, counter=2)
    assert again.accept(_ask(stage, again.message)).grant == grant
    assert len(stage.parts.registry) == 4
    counting = _count_unsealing(stage)
    assert {_refusal(stage, each.message) for each in (attempt, again) * 50} == {"replayed"}
    stage.restart_aggregator()
    stage.settle()
    after = _count_unsealing(stage)
    assert {_refusal(stage, each.message) for each in (attempt, again) * 50} == {"old-incarnation"}
    assert counting.unseals == after.unseals == 0
    assert len(stage.parts.registry) == 4
    # Nobody was charged: the code's owner is still heard, in the new life too.
    for counter in range(3, 10):
        later = _attempt(stage, code, key, counter)
        assert later.accept(_ask(stage, later.message)).grant == grant


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
