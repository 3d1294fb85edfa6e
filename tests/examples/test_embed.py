"""The program that embeds a device, where it cannot join."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from device_sdk import Device
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS

_ROOT = Path(__file__).parents[2]


def test_a_mistyped_code_ends_it_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.embed", "mqtt://127.0.0.1:1", "film-1"],
        input="nonsense\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "embed: the enrolment code is mistyped: an enrolment code has 88 characters, 8 were given\n"
    )


def test_a_second_start_says_that_the_home_knows_its_fleet(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    with SmallAggregator(mosquitto.url) as aggregator:
        Device.enrol(
            mosquitto.url,
            aggregator.code(),
            tmp_path / "tessera-home",
            timeout_seconds=PATIENCE_SECONDS,
        ).close()
    with subprocess.Popen(
        [sys.executable, "-m", "examples.embed", "mqtt://elsewhere.example", "film-1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.kill()
    assert said == f"tessera-home has joined the fleet at {mosquitto.url} before: URL is not used\n"
