"""What makes a device time itself again."""

from __future__ import annotations

import numpy as np

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from device_sdk.device import Device
from device_sdk.world import TrainingOptions
from tests.device_sdk.conftest import MakeDevice
from tests.fakes.small_aggregator import ITEMS, WIDTH, SmallAggregator


def train_round(aggregator: SmallAggregator, device: Device, number: int, seconds: float) -> None:
    aggregator.open_round(train_seconds=seconds)
    aggregator.await_(lambda: device.status().receipted_round == number)
    assert aggregator.close_round() == number


def test_rates_that_decay_do_not_make_a_device_time_itself_again(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    settings = ScatterSettings("bpr", optimizer=OptimizerSettings(decay=0.5))
    aggregator.method = ScatterMethod(
        initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(1)), settings
    )
    device = make_device(options=TrainingOptions(capability_seconds=5.0, slowdown=2.0))
    device.start()
    train_round(aggregator, device, 1, 5.0)
    status = device.status()
    assert status.k == 8 and "k = 8" in status.k_reason, status.k_reason
    assert status.slowdown == 2.0 and (status.train_seconds or 0.0) > 0
    first = status.step_p90_seconds
    assert first is not None and first > 0
    train_round(aggregator, device, 2, 5.0)
    # Measured again it would be another number, in nanoseconds.
    assert device.status().step_p90_seconds == first
    # Less time for a round is a reason.
    train_round(aggregator, device, 3, 4.0)
    assert device.status().step_p90_seconds != first


def test_a_device_fits_its_training_into_what_the_app_gives_a_day(
    make_device: MakeDevice, aggregator: SmallAggregator
) -> None:
    device = make_device(options=TrainingOptions(capability_seconds=0.5, seconds_a_day=20))
    device.start()
    train_round(aggregator, device, 1, 1800.0)
    assert "80% of 10 s" in device.status().k_reason
