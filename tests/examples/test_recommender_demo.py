"""The whole demo of the recommender: real broker, aggregator and device processes, in small."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

from aggregator.demo.broker import mosquitto_path, running_broker
from aggregator.demo.child import FleetError
from examples import recommender_demo as demo
from examples.datasets import movielens
from examples.datasets.movielens import DatasetError, draw_synthetic
from examples.fleet import fleet
from examples.fleet.recommender_task import FleetSettings
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
# What a broker and the devices meet on the way stands in their logs alone.
NOISE = re.compile(r"Traceback|Error|[Ee]xception|No data|connection|transport:")


def small_ml_100k(root: Path) -> Path:
    """Drawn at random, in MovieLens' format, so that nothing is downloaded."""
    drawn = draw_synthetic(np.random.default_rng(3), users=40, items=160, per_user=12)
    folder = root / "ml-100k"
    folder.mkdir(parents=True)
    times = drawn.timestamp
    assert times is not None
    rows = zip(drawn.user.tolist(), drawn.item.tolist(), times.tolist(), strict=True)
    data = "".join(f"{user + 1}\t{item + 1}\t5\t{when}\n" for user, item, when in rows)
    (folder / "u.data").write_text(data)
    (folder / "u.item").write_text("".join(f"{n}|Film {n}|\n" for n in range(1, 161)))
    return root


@pytest.mark.slow
def test_a_small_fleet_learns_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    devices, rounds = 8, 4

    def offline(folder: Path, console: Console) -> None:
        raise DatasetError("no network in this test")

    monkeypatch.setattr(demo, "download_with_bar", offline)
    few = partial(draw_synthetic, users=160, items=400)
    monkeypatch.setattr(movielens, "draw_synthetic", few)
    # However busy this machine is, a round ends when everybody has answered.
    endless = partial(FleetSettings, least_deadline_seconds=NEVER_SECONDS)
    monkeypatch.setattr(fleet, "FleetSettings", endless)
    monkeypatch.setattr(fleet, "deadline_seconds", lambda plan: NEVER_SECONDS)
    # What multiprocessing keeps for an earlier test of this process is no child of the demo's.
    before = psutil.Process().children(recursive=True)
    out = tmp_path / "out"
    command = ["--data", str(tmp_path / "none"), "--out", str(out)]
    size = ["--devices", f"{devices}", "--processes", "2", "--rounds", f"{rounds}"]
    assert demo.main([*command, *size]) == 0
    whole = capfd.readouterr()
    assert whole.err == ""
    assert not NOISE.search(whole.out)
    assert len(whole.out.splitlines()) < 200
    printed = " ".join(whole.out.split())
    assert "SYNTHETIC DATA" in printed
    assert "no network in this test" in printed
    assert f"{rounds} of {rounds} rounds, {rounds * devices} updates counted" in printed
    assert "messages that the aggregator refused: none" in printed
    assert printed.count("recommended") == 3
    assert "Synthetic item" in printed
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "SYNTHETIC DATA" in report
    # The version that came of the last round was evaluated, too.
    assert "final" in printed
    assert "HR@10 of all items after the last round" in report
    homes = sorted(path.name for path in (out / "fleet" / "homes").iterdir())
    assert homes == [f"device-{n:02}" for n in range(1, devices + 1)]
    # Held-out items were never recorded: each user has all but the latest.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    assert demo.main([*command]) == 1
    assert "holds an earlier run" in " ".join(capfd.readouterr().out.split())


def started_demo(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A small demo without an end, in its third round, and its children."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "examples.recommender_demo", "--out", str(out)]
    command += ["--data", str(small_ml_100k(tmp_path / "data"))]
    command += ["--devices", "4", "--processes", "1", "--rounds", "100000", *more]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + PATIENCE_SECONDS
    journal = out / "fleet" / "devices-1.jsonl"
    while not journal.exists() or '"round":3' not in journal.read_text(encoding="utf-8"):
        if time.monotonic() > until or process.poll() is not None:
            process.kill()
            pytest.fail(f"the demo did not get to its third round: {process.communicate()[0]}")
        time.sleep(0.1)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.exhaustive
def test_kill_9_leaves_no_child_behind(tmp_path: Path) -> None:
    """With the broker that pip installs, which is as quiet as Mosquitto."""
    process, children = started_demo(tmp_path, "--broker", "amqtt")
    assert len(children) >= 3, "the aggregator, a process of devices and the broker"
    process.kill()
    printed = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert "amqtt, as a child process" in " ".join(printed.split())
    assert not NOISE.search(printed)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
    for child in alive:
        child.kill()
    assert alive == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.exhaustive
def test_ctrl_c_stops_every_child_and_shows_what_is_known(tmp_path: Path) -> None:
    process, children = started_demo(tmp_path)
    try:
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        printed = " ".join(process.communicate(timeout=PATIENCE_SECONDS)[0].split())
    finally:
        process.kill()
    assert process.returncode == 130
    assert "every child process has ended" in printed
    assert "HR@10" in printed
    assert "recommended" in printed
    assert "SYNTHETIC" not in printed
    assert not any(child.is_running() for child in children)
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The run ended early: it was interrupted." in report


def test_too_few_devices_for_the_processes_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--devices", "8"])
    assert stopped.value.code == 2
    assert "take at least 16" in capsys.readouterr().err


def answers(url: str) -> bool:
    host, port = url.removeprefix("mqtt://").split(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("executable", [mosquitto_path(), None], ids=["mosquitto", "amqtt"])
def test_a_broker_comes_and_goes(tmp_path: Path, executable: str | None) -> None:
    with running_broker(tmp_path, executable) as broker:
        assert broker.alive()
        assert answers(broker.url)
    assert not broker.alive()
    assert not answers(broker.url)


def test_a_broker_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "mosquitto"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o700)
    with pytest.raises(FleetError, match="no such luck"), running_broker(tmp_path, str(broken)):
        pass
