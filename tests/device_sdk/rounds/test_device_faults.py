"""What the network and strangers can do to a device: nothing but cost it time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.cli.run import status_line
from device_sdk.device import Device
from device_sdk.link.link import Link
from device_sdk.train.job import TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import ManifestTopic, PresenceTopic
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.brokers.proxy import Proxy
from tests.device_sdk.conftest import MakeDevice
from tests.fakes.small_aggregator import WIDTH, SmallAggregator, small_catalogue


def started(make_device: MakeDevice, aggregator: SmallAggregator) -> Device:
    device = make_device()
    device.start()
    aggregator.await_(lambda: device.status().session)
    return device


def await_receipt(aggregator: SmallAggregator, device: Device, round_id: int) -> None:
    aggregator.await_(lambda: device.status().receipted_round == round_id)


def await_refusal(aggregator: SmallAggregator, device: Device, reason: str) -> None:
    aggregator.await_(lambda: reason in device.status().refused)


def test_a_tampered_chunk_is_refused_and_the_right_one_fetched_again(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.knobs.tamper_chunk = lambda index, message: message[:-1] + bytes((message[-1] ^ 1,))
    aggregator.open_round()
    await_refusal(aggregator, device, "wrong-chunk")
    assert device.status().working_on == 1 and not aggregator.seen.bodies
    aggregator.mend_chunks()
    await_receipt(aggregator, device, 1)
    assert device.status().verdict == "counted"


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda message: message[:60] + bytes((message[60] ^ 1,)) + message[61:], "bad-tag"),
        (lambda message: message[:40], "truncated"),
        (lambda message: b"\x09" * 300, "bad-version"),
    ],
)
def test_a_tampered_manifest_is_refused_and_the_next_round_taken(
    make_device: MakeDevice,
    aggregator: SmallAggregator,
    tamper: Callable[[bytes], bytes],
    reason: str,
) -> None:
    device = started(make_device, aggregator)
    aggregator.knobs.tamper_manifest = tamper
    aggregator.open_round()
    await_refusal(aggregator, device, reason)
    assert device.status().round is None
    aggregator.knobs.tamper_manifest = lambda message: message
    aggregator.open_round()
    await_receipt(aggregator, device, 2)


def test_a_manifest_signed_by_another_holder_of_the_group_key_is_refused(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round(signing=Ed25519PrivateKey.generate())
    await_refusal(aggregator, device, "bad-signature")
    assert device.status().working_on is None and device.status().round is None


def test_an_old_manifest_shown_again_is_refused(
    make_device: MakeDevice, aggregator: SmallAggregator, mosquitto: Mosquitto
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    old = aggregator.manifest_message
    aggregator.open_round()
    await_receipt(aggregator, device, 2)
    stranger = Link(mosquitto.url, rng=np.random.default_rng(), clock=time.monotonic)
    stranger.start()
    topic = aggregator.topics.write(ManifestTopic("default", "all"))
    stranger.publish(topic, old, retain=True)
    await_refusal(aggregator, device, "stale-manifest")
    stranger.publish(aggregator.topics.write(PresenceTopic()), os.urandom(100))
    aggregator.await_(lambda: sum(device.status().refused.values()) >= 2)
    stranger.stop(flush_seconds=1)
    assert device.status().round == 2
    assert aggregator.rounds_seen() == [1, 2]


def test_the_same_bytes_are_sent_until_the_receipt_comes_and_the_session_is_renewed(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.knobs.receipts = False
    aggregator.open_round()
    aggregator.await_(lambda: len(aggregator.seen.bodies) >= 4)
    assert len({body for _, body in aggregator.seen.bodies}) == 1
    assert aggregator.seen.opens >= 2  # after three unanswered sends
    assert device.status().outbox == 1
    aggregator.knobs.receipts = True
    await_receipt(aggregator, device, 1)
    assert device.status().outbox == 0


def test_a_device_without_receipts_stops_training_says_so_and_goes_on_when_they_come(
    make_device: MakeDevice, aggregator: SmallAggregator, caplog: pytest.LogCaptureFixture
) -> None:
    device = make_device(options=TrainingOptions(k=8, most_outbox_updates=2))
    device.start()
    aggregator.knobs.receipts = False
    for number in range(1, 5):
        aggregator.open_round()
        aggregator.await_(lambda number=number: device.status().round == number)  # type: ignore[misc]
    status = device.status()
    assert (status.outcome, status.outbox, status.trained_round) == ("outbox-full", 2, 2)
    assert "2 updates" in status.problem and "2 updates" in status.detail
    assert [each.getMessage() for each in caplog.records if "not trained" in each.message] == [
        f"round 3 and later ones are not trained: {status.detail}"
    ]
    aggregator.knobs.receipts = True
    aggregator.await_(lambda: device.status().outbox == 0)
    assert device.status().problem == ""
    aggregator.open_round()
    await_receipt(aggregator, device, 5)
    assert aggregator.rounds_seen() == [1, 2, 5]


def test_an_aggregator_that_restarted_gets_the_update_under_a_new_session(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.knobs.receipts = False
    aggregator.open_round()
    aggregator.await_(lambda: bool(aggregator.seen.bodies))
    aggregator.forget_sessions()
    aggregator.knobs.receipts = True
    aggregator.publish_standing()
    await_receipt(aggregator, device, 1)
    assert aggregator.seen.opens >= 2 and len(set(aggregator.seen.bodies)) == 1


def test_group_key_and_descriptor_rotate_under_a_running_device(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.rotate_group_key()
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    assert "unknown-epoch" in device.status().refused and aggregator.seen.opens >= 2
    aggregator.rotate_descriptor()
    aggregator.open_round()
    await_receipt(aggregator, device, 2)


def test_the_broker_goes_away_and_comes_back(
    make_device: MakeDevice, aggregator: SmallAggregator, mosquitto: Mosquitto
) -> None:
    proxy = Proxy(mosquitto.port)
    try:
        device = make_device(proxy.url)
        device.start()
        aggregator.await_(lambda: device.status().session)
        proxy.freeze()
        aggregator.open_round()
        aggregator.await_(lambda: "broker" in device.status().problem)
        assert not device.status().connected
        device.record("film-20", user="anna")
        proxy.thaw()
        await_receipt(aggregator, device, 1)
        assert device.status().problem == ""
    finally:
        device.close()
        proxy.stop()


@pytest.mark.parametrize("verdict", [Verdict.LATE, Verdict.FORGOTTEN, Verdict.CONFLICT])
def test_every_verdict_empties_the_outbox(
    make_device: MakeDevice, aggregator: SmallAggregator, verdict: Verdict
) -> None:
    device = started(make_device, aggregator)
    aggregator.knobs.verdict = verdict
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    assert device.status().verdict == verdict.value and device.status().outbox == 0


def test_a_device_that_waits_in_vain_shows_it(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.revision, aggregator.served = 1, ()
    aggregator.publish_standing()
    aggregator.await_(lambda: "serves no task for this device" in device.status().problem)
    assert status_line(device.status()).endswith("; there is none")
    (known,) = device.tasks()
    assert not known.takes_part and "does not serve it" in known.why_not
    aggregator.revision, aggregator.served = 2, (("default", "all"), ("films", "all"))
    aggregator.publish_standing()
    aggregator.await_(lambda: device.status().problem == "")


def test_who_is_not_selected_fetches_nothing(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round(threshold=0)
    aggregator.await_(lambda: device.status().round == 1)
    assert device.status().outcome == "not-selected" and not aggregator.seen.bodies


def test_a_round_that_is_over_on_arrival_is_left_alone(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round(deadline_seconds=-5)
    await_refusal(aggregator, device, "expired-manifest")
    assert not aggregator.seen.bodies


def test_a_method_without_a_learner_is_declined(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round(method="later")
    aggregator.await_(lambda: device.status().round == 1)
    assert device.status().outcome == "declined" and "'later'" in device.status().detail


def test_items_are_appended_between_rounds(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    device.record("film-41", user="anna")  # not in the catalogue yet
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    aggregator.close_round()
    aggregator.catalogue = small_catalogue(44)
    aggregator.method.grow(np.full((4, WIDTH), 0.1, np.float32))
    aggregator.open_round()
    await_receipt(aggregator, device, 2)
    assert device.status().verdict == "counted"
    offered = {item for item, _ in device.recommend(44, user="anna")}
    assert "film-43" in offered and "film-41" not in offered

    aggregator.catalogue = Catalogue(tuple(f"other-{n}" for n in range(44)), ("",) * 44)
    aggregator.open_round()
    await_refusal(aggregator, device, "bad-catalogue")
    assert device.status().outcome == "failed" and device.status().trained_round == 2


def test_k_is_measured_once_and_said_why(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device(options=TrainingOptions(capability_seconds=5.0, slowdown=2.0))
    device.start()
    aggregator.open_round(train_seconds=5.0)
    await_receipt(aggregator, device, 1)
    status = device.status()
    assert status.k == 8 and "k = 8" in status.k_reason, status.k_reason
    assert status.slowdown == 2.0
    assert status.step_p90_seconds is not None and status.step_p90_seconds > 0
    assert status.train_seconds is not None and status.train_seconds > 0
    aggregator.open_round(train_seconds=5.0)
    await_receipt(aggregator, device, 2)
    # Measured again it would be another number, in nanoseconds.
    assert device.status().step_p90_seconds == status.step_p90_seconds


def test_an_expired_descriptor_ends_in_no_session(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device()
    aggregator.offset_seconds = 7200
    device.start()
    await_refusal(aggregator, device, "descriptor-expired")
    assert not device.status().session
    aggregator.rotate_descriptor()
    aggregator.await_(lambda: device.status().session)
    aggregator.offset_seconds = 0
    assert device.status().time_unix_seconds >= time.time() + 7000
    device.stop()
    # The largest time seen is on the disk: time does not fall with a restart.
    assert device.status().time_unix_seconds >= time.time() + 7000


def test_a_task_that_rests_leaves_its_last_version_with_the_device(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = started(make_device, aggregator)
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    assert device.status().version == 0
    before = device.recommend(40, user="anna")
    aggregator.close_round()
    aggregator.open_round(threshold=0)
    aggregator.await_(lambda: device.status().outcome == "read")
    status = device.status()
    assert (status.version, status.trained_round, status.round) == (1, 1, 2)
    assert device.recommend(40, user="anna") != before
    assert aggregator.rounds_seen() == [1]


def test_an_aggregator_that_never_answers_shows_in_the_status(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device()
    aggregator.knobs.answers_opens = False
    device.start()
    aggregator.await_(lambda: "revoked" in device.status().problem)
    aggregator.knobs.answers_opens = True
    aggregator.await_(lambda: device.status().session)
    assert device.status().problem == ""


class Mute(Exception):
    """One that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error", [ValueError("a slip"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Mute()]
)
def test_a_learner_that_fails_in_any_way_ends_its_round_and_not_the_device(
    make_device: MakeDevice,
    aggregator: SmallAggregator,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = started(make_device, aggregator)

    def fail(self: ScatterTrainer, job: object) -> object:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ScatterTrainer, "train", fail)
        aggregator.open_round()
        aggregator.await_(lambda: device.status().outcome == "failed")
    assert type(error).__name__ in device.status().detail
    aggregator.open_round()
    await_receipt(aggregator, device, 2)
    assert device.status().verdict == "counted"


UNFIT: dict[str, dict[str, object]] = {
    "a state that no home holds": {"learner_state": {"left": np.array([object()])}},
    "a state that is none": {"learner_state": 7},
    "a body that is none": {"body": None},
    "columns that no home holds": {"k": 2**70},
    "nothing that was trained": {"capability": "none"},
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_a_learner_returns_and_no_home_can_hold_ends_its_round_and_not_the_device(
    make_device: MakeDevice,
    aggregator: SmallAggregator,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = started(make_device, aggregator)
    train, trained = ScatterTrainer.train, 0

    def unfit(self: ScatterTrainer, job: TrainingJob) -> object:
        nonlocal trained
        trained += 1
        return replace(train(self, job), **UNFIT[what])  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ScatterTrainer, "train", unfit)
        aggregator.open_round()
        aggregator.await_(lambda: device.status().outcome == "failed")
    assert trained == 1
    aggregator.open_round()
    await_receipt(aggregator, device, 2)
    assert device.status().verdict == "counted"
