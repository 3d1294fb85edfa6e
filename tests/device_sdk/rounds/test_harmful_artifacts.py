"""An artifact that hangs or crashes, on a real device of a real fleet: it is ended, named, and not
run again, and the device's other task goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from device_sdk.device import Device
from device_sdk.home.home import Home
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.bombs import Bomb, make_bomb
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import Serving, command, invite, make_home, serving
from tests.fakes.quick import joined, opened
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until

ROUND = f"quorum = 1\ndeadline_seconds = {NEVER_SECONDS}\npause_seconds = 0.2"
OPTIONS = TrainingOptions(k=4, most_step_seconds=1.0, most_memory_bytes=2**30)
GOOD_STEPS = 1100
"""Of a late bomb: more than a trial takes, and fewer than a training."""


def fleet(folder: Path, url: str, kind: Bomb) -> AggregatorHome:
    """Of two tasks: one on clicks, and ``bomb``, whose artifact became one behind its check."""
    home = make_home(folder, url, ROUND)
    linear_artifact(folder / "linear")
    linear_artifact(folder / "bomb")
    (folder / "bomb.toml").write_text(
        f'[task]\nmethod = "fedavg"\nartifacts = ["bomb"]\n[round]\n{ROUND}\n'
        "[fedavg.training]\nepochs = 2000\nlearning_rate = 0.1\n"
    )
    assert command(home, "task", "add", "bomb", "--from", str(folder / "bomb.toml")) == 0
    shutil.rmtree(folder / "bomb")
    make_bomb(kind, folder / "linear", folder / "bomb", after=GOOD_STEPS)
    return home


def enrolled(url: str, code: str, folder: Path) -> Device:
    device = joined(url, code, folder, options=OPTIONS)
    device.provide(local_data(0), task="bomb")
    device.record_all([(f"item-{n}", "anna") for n in range(5)], task="default")
    return device


def told(served: Serving, task: int) -> set[tuple[str, str]]:
    reports = served.parts.store.task(task).reports
    return {(each.outcome, each.reason) for each in reports.not_trained()}


@pytest.mark.parametrize(
    ("kind", "outcome", "reason", "words"),
    [
        ("loop", "declined", "step-too-long", "did not end within 1 s"),
        ("late-loop", "failed", "step-too-long", "did not end in its time"),
        ("crash", "declined", "crashed", "ended the process by SIGFPE"),
        ("late-memory", "failed", "out-of-memory", "Failed to allocate memory"),
    ],
)
def test_it_is_ended_and_named_and_the_other_task_goes_on(
    mosquitto: Mosquitto, tmp_path: Path, kind: Bomb, outcome: str, reason: str, words: str
) -> None:
    home = fleet(tmp_path, mosquitto.url, kind)
    (code,) = invite(home)
    with serving(home) as served:
        with enrolled(mosquitto.url, code, tmp_path / "device") as device:
            device.start()
            wait_until(lambda: (outcome, reason) in told(served, 2))
            assert words in (device.status(task="bomb").problem or "")
            last = device.status(task="default").receipted_round or 0
            wait_until(lambda: (device.status(task="default").receipted_round or 0) > last + 1)
            assert device.stop(PATIENCE_SECONDS)
        # Nothing of it is run when the device starts again.
        with opened(tmp_path / "device", options=OPTIONS, data={"bomb": local_data(0)}) as again:
            artifact = next(row for row in again._home.tasks.all() if row.name == "bomb").artifacts
            known = again._home.trials.find(artifact[0])
            assert known is not None and known.reason == reason and known.strikes == 1
            again.start()
            last = again.status(task="default").receipted_round or 0
            wait_until(lambda: (again.status(task="default").receipted_round or 0) > last)
            known = again._home.trials.find(artifact[0])
            assert known is not None and known.strikes == 1, "it was not run again"


_DEVICE = """
import sys
from pathlib import Path
from tests.brokers.links import QUICK
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from device_sdk.device import Device
from device_sdk.world import TrainingOptions

options = TrainingOptions(k=4, most_step_seconds=float(sys.argv[2]))
device = Device.open(
    Path(sys.argv[1]), pace=BRISK, link_settings=QUICK, options=options,
    data={"bomb": local_data(0)},
)
device.start()
print("started", flush=True)
sys.stdin.readline()
if sys.argv[3] == "stop":
    print("stopped", device.stop(4.0), flush=True)
"""


def _device(folder: Path, most_step_seconds: float, ends: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _DEVICE, str(folder), str(most_step_seconds), ends],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def _in_use(folder: Path, since_ns: int = 0) -> bool:
    file = folder / "in-use"
    return file.exists() and file.stat().st_mtime_ns > since_ns


@pytest.mark.parametrize("ends", ["stop", "return"])
def test_an_app_ends_cleanly_in_the_middle_of_a_step_without_end(
    mosquitto: Mosquitto, tmp_path: Path, ends: str
) -> None:
    home = fleet(tmp_path, mosquitto.url, "late-loop")
    (code,) = invite(home)
    folder = tmp_path / "device"
    with serving(home):
        enrolled(mosquitto.url, code, folder).close()
        process = _device(folder, 1e6, ends)
        wait_until(lambda: _in_use(folder))
        time.sleep(1.0)  # into that step; where it is not there yet, nothing is shown
        said, _ = process.communicate("\n", timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, said
        assert "abort" not in said.lower() and "Traceback" not in said
        if ends == "stop":
            assert "stopped True" in said
            assert not _in_use(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="kills as an out-of-memory killer does")
@pytest.mark.parametrize("kind", ["late-loop", "late-crash"])
def test_an_artifact_in_whose_training_the_process_died_twice_is_kept_out_in_words(
    mosquitto: Mosquitto, tmp_path: Path, kind: Bomb
) -> None:
    home = fleet(tmp_path, mosquitto.url, kind)
    (code,) = invite(home)
    folder = tmp_path / "device"
    with serving(home) as served:
        enrolled(mosquitto.url, code, folder).close()
        for _ in range(2):
            began_ns = time.time_ns()
            process = _device(folder, 1e6, "stop")
            wait_until(partial(_in_use, folder, began_ns))
            if kind == "late-loop":
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)
            process.communicate()
            assert process.returncode in (-signal.SIGKILL, -signal.SIGFPE)
            assert _in_use(folder)
        process = _device(folder, 1e6, "stop")
        wait_until(lambda: ("declined", "crashed") in told(served, 2))
        opened = served.parts.store.task(1).rounds.latest(1)[0].round
        wait_until(lambda: served.parts.store.task(1).rounds.latest(1)[0].round > opened + 1)
        said, _ = process.communicate("\n", timeout=PATIENCE_SECONDS)
        assert "stopped True" in said
    opened = Home(folder)
    (artifact,) = next(row for row in opened.tasks.all() if row.name == "bomb").artifacts
    known = opened.trials.find(artifact)
    opened.close()
    assert known is not None and (known.strikes, known.reason) == (2, "crashed")
