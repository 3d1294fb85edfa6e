"""Whatever befell clocks, homes and brokers, the living go on: `python -m tests.attacks.nemeses`
makes many such runs. What is asserted is the stage's own judgement, at its end."""

from __future__ import annotations

import pytest

from tests.attacks.conftest import MakeStage
from tests.attacks.nemeses import DAY_SECONDS, DEVICES, OF_ALL, OF_CLOCKS, ROUND, SETS_BACK, torment
from tests.faults.oracle import Mismatch


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_clocks_that_step_strobe_and_drift_shut_nobody_out(
    make_stage: MakeStage, seed: int
) -> None:
    torment(make_stage(devices=DEVICES, round_lines=ROUND), seed, 6, OF_CLOCKS)


def test_everything_at_once_shuts_nobody_out(make_stage: MakeStage) -> None:
    torment(make_stage(devices=DEVICES, round_lines=ROUND), 10, 10, OF_ALL)


def test_an_aggregator_put_back_on_a_machine_of_another_calendar(make_stage: MakeStage) -> None:
    # Devices know of updates that the home has forgotten: nothing to judge by.
    stage = make_stage(judged=False, devices=DEVICES, round_lines=ROUND)
    torment(stage, 7, 4, SETS_BACK)


def test_a_device_whose_crystal_is_100_ppm_fast_is_counted_for_forty_days(
    make_stage: MakeStage,
) -> None:
    lines = "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 300\npause_seconds = 5"
    stage = make_stage(devices=2, round_lines=lines)
    device = stage.devices[0]
    device.kill()
    device.rate += 100e-6
    device.start()
    for _ in range(40):
        jobs = device.jobs
        stage.run(20.0)
        assert device.jobs > jobs
        stage.now_seconds += DAY_SECONDS  # both ends are suspended; their clocks run on


def test_a_device_that_is_shut_out_is_noticed(make_stage: MakeStage) -> None:
    stage = make_stage()
    device = stage.devices[1]
    deliver, device.deliver = device.deliver, lambda parcel: None  # type: ignore[method-assign]
    with pytest.raises(Mismatch, match=r"devices \[1\] live and are not counted"):
        stage.live_on()
    stage.hand = "run tessera-device trust"
    with pytest.raises(Mismatch, match=r"\[1\] are not counted; nobody says 'run tessera-device"):
        stage.live_on()
    device.deliver = deliver  # type: ignore[method-assign]
    with pytest.raises(Mismatch, match=r"\[\] are not counted; nobody says"):
        stage.live_on()
    stage.hand = ""
