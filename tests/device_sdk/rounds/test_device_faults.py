"""What the network, strangers and an app's own learner can do to a running device: cost it time.

What a broker or a stranger shows it is in ``tests/attacks``, and what it does then over hours, in
memory, in ``test_participant.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from device_sdk.device import Device
from device_sdk.train.job import TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.wire.publish.catalogue import Catalogue
from tests.device_sdk.conftest import MakeDevice
from tests.fakes.small_aggregator import WIDTH, SmallAggregator, small_catalogue


@pytest.fixture
def device(make_device: MakeDevice, aggregator: SmallAggregator) -> Device:
    """One that runs, and has its session."""
    made = make_device()
    made.start()
    aggregator.await_(lambda: made.status().session)
    return made


def take_part(aggregator: SmallAggregator, device: Device, number: int, **terms: object) -> None:
    """In the next round, which has this number."""
    aggregator.open_round(**terms)  # type: ignore[arg-type]
    await_receipt(aggregator, device, number)
    assert device.status().verdict == "counted"


def await_receipt(aggregator: SmallAggregator, device: Device, number: int) -> None:
    aggregator.await_(lambda: device.status().receipted_round == number)


def test_a_method_without_a_learner_is_declined(
    device: Device, aggregator: SmallAggregator
) -> None:
    aggregator.open_round(method="later")
    aggregator.await_(lambda: device.status().round == 1)
    assert device.status().outcome == "declined" and "'later'" in device.status().detail


def test_items_are_appended_between_rounds(device: Device, aggregator: SmallAggregator) -> None:
    device.record("film-41", user="anna")  # not in the catalogue yet
    take_part(aggregator, device, 1)
    aggregator.close_round()
    aggregator.catalogue = small_catalogue(44)
    aggregator.method.grow(np.full((4, WIDTH), 0.1, np.float32))
    take_part(aggregator, device, 2)
    offered = {item for item, _ in device.recommend(44, user="anna")}
    assert "film-43" in offered and "film-41" not in offered

    aggregator.catalogue = Catalogue(tuple(f"other-{n}" for n in range(44)), ("",) * 44)
    aggregator.open_round()
    aggregator.await_(lambda: "bad-catalogue" in device.status().refused)
    assert device.status().outcome == "failed" and device.status().trained_round == 2


def test_an_expired_descriptor_ends_in_no_session(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device()
    aggregator.offset_seconds = 7200
    device.start()
    aggregator.await_(lambda: "descriptor-expired" in device.status().refused)
    assert not device.status().session
    aggregator.rotate_descriptor()
    aggregator.await_(lambda: device.status().session)
    aggregator.offset_seconds = 0
    assert device.status().time_unix_seconds >= time.time() + 7000
    device.stop()
    # The largest time seen is on the disk: time does not fall with a restart.
    assert device.status().time_unix_seconds >= time.time() + 7000


class Mute(Exception):
    """One that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


Train = Callable[[ScatterTrainer, TrainingJob], Any]
TRAIN = ScatterTrainer.train


def raising(error: BaseException) -> Train:
    def train(trainer: ScatterTrainer, job: TrainingJob) -> Any:
        raise error

    return train


def returning(**changed: object) -> Train:
    return lambda trainer, job: replace(TRAIN(trainer, job), **changed)  # type: ignore[arg-type]


def test_a_learner_that_fails_in_any_way_ends_its_round_and_not_the_device(
    device: Device, aggregator: SmallAggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ValueError("a slip"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Mute()]
    unfit = [
        {"learner_state": {"left": np.array([object()])}},  # a state that no home holds
        {"learner_state": 7},
        {"body": None},
        {"k": 2**70},
        {"capability": "none"},
    ]
    number = 0
    for name, train in [
        *((type(each).__name__, raising(each)) for each in errors),
        *(("", returning(**each)) for each in unfit),
    ]:
        trained: list[int] = []

        def once(trainer: ScatterTrainer, job: TrainingJob, train: Train = train) -> Any:
            trained.append(job.manifest.round)  # noqa: B023
            return train(trainer, job)

        with monkeypatch.context() as patched:
            patched.setattr(ScatterTrainer, "train", once)
            number += 1
            aggregator.open_round()
            aggregator.await_(lambda number=number: device.status().round == number)  # type: ignore[misc]
        status = device.status()
        assert status.outcome == "failed" and name in status.detail and trained == [number]
        number += 1
        take_part(aggregator, device, number)
