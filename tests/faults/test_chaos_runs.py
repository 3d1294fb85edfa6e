"""A short run with each broker: the long ones are `make chaos`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.brokers.mosquitto import EXECUTABLE
from tests.faults.chaos import RunSettings, run, sweep
from tests.faults.crash_points import AGGREGATOR_POINTS, DEVICE_POINTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "more"),
    [
        ("mosquitto", {"ladder": True}),
        ("mosquitto", {"late": True}),
        ("mosquitto-persistent", {}),
        ("amqtt", {}),
    ],
    ids=["mosquitto-ladder", "mosquitto-late", "mosquitto-persistent", "amqtt"],
)
def test_nothing_is_lost_and_nothing_counted_twice(
    broker: str, more: dict[str, bool], tmp_path: Path
) -> None:
    if broker == "amqtt" and importlib.util.find_spec("amqtt") is None:
        pytest.skip("amqtt is not installed (pip install amqtt)")
    if broker != "amqtt" and EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    # amqtt moves few packets a second, and only packets that move can be mistreated.
    seconds = 8.0 if broker == "amqtt" else 4.0
    settings = RunSettings(
        seed=11, broker=broker, seconds=seconds, least_faults=40, devices=8, **more
    )
    result = run(settings, tmp_path)
    assert result.judgement.lost == result.judgement.twice == result.judgement.waiting == 0
    assert result.judgement.receipted.get("counted", 0) > 0
    assert result.faults.total() > 30
    assert (result.judgement.late > 0) == ("late" in more)


@pytest.mark.slow
def test_a_death_at_every_point_of_a_commit(tmp_path: Path) -> None:
    if EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    settings = RunSettings(seed=3, broker="mosquitto", seconds=0.0, devices=9, deadline_seconds=1.0)
    result = sweep(settings, tmp_path)
    assert result.faults.total() == len(AGGREGATOR_POINTS) + len(DEVICE_POINTS)
    assert result.judgement.lost == result.judgement.twice == result.judgement.waiting == 0
    assert result.judgement.versions > 5
