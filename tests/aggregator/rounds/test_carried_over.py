"""Updates that are carried over: a quorum counts them, and what is shown tells of how many devices
they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aggregator.rounds.test_evaluator import DEVICES, ROUND, Fleet
from tests.fakes.outputs import output_of


def test_a_device_that_sends_again_in_the_next_round_is_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = DEVICES[:2]
    fleet = Fleet(tmp_path, "", ROUND.replace("quorum = 3", "quorum = 7"))
    for _ in range(3):
        fleet.play({}, (one, other))
    problem = "3 rounds made no version: 6, 4, 2 updates with those carried over, of 2 devices"
    told = output_of(capsys, fleet.home, "status")
    assert problem in told
    closes = "6 of the 7 updates have come that make a version"
    assert f"{closes}; 6 updates with those carried over, of 2 devices" in told
    # The version is of two devices, though seven updates made it.
    fleet.play({}, (one,))
    (row, *_) = fleet.parts.first.store.rounds.latest(2)[1:]
    assert (row.next_version, row.participants) == (1, 7)
    assert [each.devices for each in fleet.parts.first.store.versions.all()] == [2, 0]
    # Of those who sent one each nothing more is said.
    fleet.send(one, None)
    fleet.commit()
    told = output_of(capsys, fleet.home, "status")
    assert "1 of the 7 updates have come that make a version" in told
    assert "carried over" not in told
