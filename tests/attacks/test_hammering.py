"""One enrolled device that sends the same again and again, and what that moves."""

from __future__ import annotations

from aggregator.store.rows import Habit
from device_sdk.wire.publish.receipts import RecordType, UpdateIdentity, write_update
from device_sdk.wire.publish.topics import DownTopic
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import AGGREGATOR, Parcel
from tests.attacks.stage import Stage
from tests.faults.known import known_body

_COPIES = 3000
_DEVICES = 10
_LONG = f"quorum = 5\nwait_for_devices = {_DEVICES}\ndeadline_seconds = 3600\npause_seconds = 2"


class Hammer:
    """Device 0, which missed a round's end and now sends its update of that round."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        rounds = stage.parts.first.rounds
        stage.await_version(6)
        stage.drop = lambda parcel: parcel.topic == stage.up_topic(0)
        stage.run_until(lambda: rounds.current is not None and rounds.outstanding == 1, 300.0)
        self.round = rounds.current.round
        stage.run_until(lambda: rounds.next_number() > self.round + 1, 8000.0)
        # No update of its own gets through meanwhile, and no receipt makes it send another.
        self.silence()

    def silence(self) -> None:
        """Nothing but what :meth:`send` sends reaches anybody."""
        self.stage.drop = lambda parcel: True

    def envelope(self) -> bytes:
        """The update, sealed anew."""
        device = self.stage.devices[0]
        generation = self.stage.parts.first.rounds.generation
        identity = UpdateIdentity(device.grant.device_id, "default", generation, self.round)
        update = write_update(identity, known_body(0, generation, self.round))
        return device.participant.sessions.seal(RecordType.UPDATE, update)

    def send(self, copies: int, envelope: bytes | None = None) -> int:
        """Send copies at once; how many receipts came back."""
        before = self._receipts()
        for _ in range(copies):
            message = self.envelope() if envelope is None else envelope
            self.stage.link.deliver(Parcel(AGGREGATOR, self.stage.up_topic(0), message, False))
        for _ in range(copies // 16 + 1):
            self.stage.service.turn()
        return self._receipts() - before

    def _receipts(self) -> int:
        topic = self.stage.topics.write(DownTopic(self.stage.devices[0].grant.handle))
        seen = self.stage.broker.seen
        return sum(at == topic and sent[1] == RecordType.RECEIPT for at, sent in seen)

    def habits(self) -> list[Habit]:
        """What is known of each device."""
        found = self.stage.parts.first.rounds._attendance.habits
        return [found.of(each.grant.device_id) for each in self.stage.devices]


def test_a_late_update_sent_3000_times_holds_up_rounds_as_once(make_stage: MakeStage) -> None:
    hammer = Hammer(make_stage(judged=False, devices=_DEVICES, round_lines=_LONG))
    before = hammer.habits()
    hammer.stage.now_seconds += 900.0  # a quarter of an hour late
    hammer.send(1)
    once = hammer.habits()
    # Rounds wait longer for itself, and for nobody else.
    assert once[1:] == before[1:] and (once[0].seconds or 0.0) > 900.0
    for _ in range(20):
        hammer.stage.now_seconds += 40.0  # so that more are heard
        hammer.send(_COPIES // 20)
    assert hammer.habits() == once


def test_a_device_that_hammers_is_answered_a_bounded_number_of_times(
    make_stage: MakeStage,
) -> None:
    hammer = Hammer(make_stage(judged=False))
    assert hammer.send(_COPIES) == 64
    assert hammer.stage.refusals("too-many-repeats") == 1 + _COPIES - 64
    hammer.stage.now_seconds += 10.0
    assert hammer.send(_COPIES) == 10


def test_nobody_else_can_silence_a_device(make_stage: MakeStage) -> None:
    hammer = Hammer(make_stage(judged=False))
    envelope = hammer.envelope()
    assert hammer.send(_COPIES, envelope) == 1  # the rest are replays, and nobody's
    assert hammer.send(_COPIES, b"\x01\x10" + bytes(200)) == 0
    assert hammer.send(10) == 10


def test_a_device_that_hammered_is_counted_again(make_stage: MakeStage) -> None:
    stage = make_stage()
    Hammer(stage).send(_COPIES)
    stage.drop = lambda parcel: False
    counted = stage.parts.first.ingest.counted
    stage.run_until(lambda: stage.parts.first.ingest.counted >= counted + 6)
    stage.run(30.0)
    told = [
        stage.verdict(0, number) for number in range(1, stage.parts.first.rounds.next_number() - 1)
    ]
    assert None not in told and told[-1] == "counted"
