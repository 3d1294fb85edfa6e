"""What a seed reproduces: the fault of every packet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.faults.wire_faults import FaultRates, Schedule, WireFault

PACKETS = 20_000


def _faults(
    seed: int = 1, client: str = "a", connection: int = 0, direction: str = "up"
) -> list[WireFault | None]:
    schedule = Schedule(seed, client, connection, direction, FaultRates())
    return [schedule.next() for _ in range(PACKETS)]


def test_the_same_names_meet_the_same_faults() -> None:
    assert _faults() == _faults()
    others = [_faults(seed=2), _faults(client="b"), _faults(connection=1), _faults(direction="do")]
    assert all(other != _faults() for other in others)


def test_faults_come_as_often_as_they_should() -> None:
    counts = Counter(_faults())
    rates = np.array(FaultRates().in_order())
    found = np.array([counts[fault] for fault in WireFault]) / PACKETS
    # Five standard deviations of a count.
    assert (np.abs(found - rates) < 5 * np.sqrt(rates / PACKETS)).all()


def test_rates_that_leave_no_packet_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="below 1"):
        FaultRates(delay=0.9, cut=0.1)
