"""The measured floods, small: everything comes up, and every honest update is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.aggregator.broker import MOSQUITTO
from benchmarks.aggregator.serving import measure_through_broker
from benchmarks.aggregator.under_attack import KINDS, measure_under_attack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_honest_updates_are_counted_under_each_flood(kind: str, tmp_path: Path) -> None:
    found = measure_under_attack(kind, 300, 3, 2, tmp_path)
    assert found.unloaded > 0 and found.loaded > 0
    assert found.flood_rate > 100
    assert {*found.cores} == {"aggregator", "broker", "fleet", "flood"}


def test_a_way_that_takes_time(tmp_path: Path) -> None:
    found = measure_through_broker(3, 2, tmp_path, settings="defaults", rtt_ms=40)
    assert found.updates == 6
    assert found.seconds >= 2 * 0.04  # the manifest, and the receipts, of each round
