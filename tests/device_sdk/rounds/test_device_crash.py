"""kill -9 of a device's process, at chosen and at random moments."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from device_sdk.device import Device
from device_sdk.errors import HomeLocked
from device_sdk.home.home import Home
from device_sdk.home.round_store import RoundOutcome
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[2] / "fakes" / "dying_device.py"


def spawn(home: Path, point: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(home), point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)


def is_consistent(folder: Path) -> int | None:
    """Check what a dead process left; the newest round that was trained."""
    home = Home(folder)
    try:
        waiting = {row.round for row in home.rounds.outbox()}
        trained = home.rounds.last(trained=True)
        state, model = home.models.learner("default"), home.models.model_mark("default")
        assert (state is None) == (model is None) == (trained is None)
        if trained is None:
            assert not waiting
            return None
        assert trained.outcome is RoundOutcome.TRAINED and model is not None
        assert model[1] == trained.round
        assert (trained.verdict is None) == (trained.round in waiting)
        return trained.round
    finally:
        home.close()


def bodies_of(aggregator: SmallAggregator, round_id: int) -> list[bytes]:
    return [body for identity, body in aggregator.seen.bodies if identity.round == round_id]


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("before-commit", False),
        ("after-commit", True),
        ("after-send", True),
        ("before-settle", True),
        ("after-settle", True),
    ],
)
def test_a_death_at_any_point_loses_and_doubles_nothing(
    device: Device, aggregator: SmallAggregator, point: str, committed: bool
) -> None:
    device.close()
    manifest = aggregator.open_round()
    process = spawn(device.home, point)
    process.wait(
        PATIENCE_SECONDS
    )  # its standard input stays open: the end of that would end it too
    end(process)
    assert process.returncode == -signal.SIGKILL
    assert is_consistent(device.home) == (manifest.round if committed else None)
    before = bodies_of(aggregator, 1)
    last = spawn(device.home, "never")
    aggregator.await_(lambda: bool(aggregator._counted) and settled(device.home))
    end(last)
    bodies = bodies_of(aggregator, 1)
    assert len(set(bodies)) == 1
    assert aggregator.method.close_round().participants == 1
    if point == "after-settle":
        # The receipt was on the disk: the process after it sent nothing again.
        assert bodies_of(aggregator, 1) == before


def settled(folder: Path) -> bool:
    with Device.open(folder, read_only=True) as device:
        status = device.status()
    return status.outbox == 0 and status.verdict == "counted"


def test_deaths_at_random_moments_never_make_two_bodies_of_a_round(
    device: Device, aggregator: SmallAggregator
) -> None:
    device.close()
    draw = random.Random(4)
    for _ in range(6):
        aggregator.open_round()
        process = spawn(device.home, "never")
        time.sleep(draw.uniform(0.0, 0.5))
        end(process)
        is_consistent(device.home)
    last = spawn(device.home, "never")
    # A verdict alone may be that of an earlier round, had before the last process did anything.
    aggregator.await_(lambda: bool(bodies_of(aggregator, 6)) and settled(device.home))
    end(last)
    by_round = {n: set(bodies_of(aggregator, n)) for n in range(1, 7)}
    assert all(len(bodies) <= 1 for bodies in by_round.values())
    assert len(by_round[6]) == 1


def test_a_home_belongs_to_one_process(device: Device) -> None:
    with pytest.raises(HomeLocked, match="in use by process"):
        Device.open(device.home)
    device.close()
    process = spawn(device.home, "never")
    with pytest.raises(HomeLocked, match=f"process {process.pid}"):
        Device.open(device.home)
    with Device.open(device.home, read_only=True) as reader:
        assert reader.status().interactions == 6
    end(process)
    Device.open(device.home).close()


def test_sigterm_ends_the_command_cleanly_and_the_outbox_stays(
    device: Device, aggregator: SmallAggregator
) -> None:
    device.close()
    aggregator.knobs.receipts = False
    aggregator.open_round()
    process = subprocess.Popen(
        [sys.executable, "-m", "device_sdk.cli", "run", "--home", str(device.home), "--k", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    aggregator.await_(lambda: bool(aggregator.seen.bodies))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "1 users, 6 interactions" in output
    assert is_consistent(device.home) == 1
    with Device.open(device.home, read_only=True) as reader:
        assert reader.status().outbox == 1 and reader.status().k == 2


def test_an_idle_device_uses_no_cpu(device: Device, aggregator: SmallAggregator) -> None:
    aggregator.open_round()
    device.start()
    aggregator.await_(lambda: device.status().receipted_round == 1)
    device.close()
    opens = aggregator.seen.opens
    process = spawn(device.home, "idle")
    aggregator.await_(lambda: aggregator.seen.opens > opens)
    time.sleep(0.5)
    began = cpu_ticks(process.pid)
    time.sleep(2.0)
    assert cpu_ticks(process.pid) - began <= 2
    end(process)


def cpu_ticks(pid: int) -> int:
    """What a process has used, in ticks of the kernel's clock (100 a second)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
