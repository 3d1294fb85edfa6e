"""A broker, the other end, and devices with short waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from device_sdk.device import Device
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.quick import joined
from tests.fakes.small_aggregator import SmallAggregator

MakeDevice = Callable[..., Device]


@pytest.fixture
def aggregator(mosquitto: Mosquitto) -> Iterator[SmallAggregator]:
    with SmallAggregator(mosquitto.url) as running:
        yield running


@pytest.fixture
def make_device(
    mosquitto: Mosquitto, aggregator: SmallAggregator, tmp_path: Path
) -> Iterator[MakeDevice]:
    """Enrols devices, with a few interactions each; they close with the test."""
    with ExitStack() as stack:
        made = 0

        def make(url: str = "", options: TrainingOptions | None = None) -> Device:
            nonlocal made
            made += 1
            device = joined(
                url or mosquitto.url,
                aggregator.code(),
                tmp_path / f"home-{made}",
                options=options or TrainingOptions(k=4),
            )
            device.record_all([(f"film-{n}", "anna") for n in range(made, made + 6)])
            return stack.enter_context(device)

        yield make


@pytest.fixture
def device(make_device: MakeDevice) -> Device:
    """One that has joined, and does not run."""
    return make_device()
