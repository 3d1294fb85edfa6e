"""Methods on local arrays over a real broker: the aggregator's program, devices, and deaths."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import Home as AggregatorHome
from aggregator.key_folder import initialise
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from benchmarks.simulator.simulation import Simulation
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.device import Device
from device_sdk.home.errors import NothingLearnt
from device_sdk.learners.fedavg import FedAvgLearner
from device_sdk.local_data import LocalData
from device_sdk.wire.fedavg_settings import FedAvgTraining
from tests.aggregator.homes import ServeProcess, invite
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.device.array_device import local_data
from tests.device_sdk.device.brisk import BRISK
from tests.device_sdk.handmade import linear_artifact

DEVICES, ROUNDS = 3, 6
TRAINING = FedAvgTraining(epochs=2, batch_size=0, learning_rate=0.1)
SCRIPT = Path(__file__).with_name("array_device.py")


def make_home(folder: Path, url: str, rounds: int = ROUNDS, pause: float = 0.15) -> AggregatorHome:
    linear_artifact(folder / "linear")
    home = AggregatorHome(folder / "fleet")
    initialise(home, int(time.time()), os.urandom)
    home.task_file.write_text(f"""
[task]
method = "fedavg"
artifacts = ["{folder / "linear"}"]
broadcast_codec = "float32"
update_codec = "float32"
[broker]
url = "{url}"
[round]
quorum = {DEVICES}
wait_for_devices = {DEVICES}
deadline_seconds = 60.0
resume_grace_seconds = 2.0
pause_seconds = {pause}
most_rounds = {rounds}
[fedavg.training]
epochs = {TRAINING.epochs}
batch_size = {TRAINING.batch_size}
learning_rate = {TRAINING.learning_rate}
""")
    return home


def simulated(folder: Path) -> FedAvgMethod:
    """The same rounds without broker, seals, processes and deaths."""
    artifact = load_artifact(folder)
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    parameters, buffers = (
        {name: array for name, array in artifact.initial.items() if kinds[name] == kind}
        for kind in ("parameter", "buffer")
    )
    method = FedAvgMethod(parameters, buffers, FedAvgSettings(training=TRAINING))
    learners = [
        FedAvgLearner(
            lambda place=place: local_data(place),  # type: ignore[misc]
            Trainer(folder),
            "",
            np.random.default_rng(place),
        )
        for place in range(DEVICES)
    ]
    simulation = Simulation(method, learners, np.random.default_rng(1))
    for _ in range(ROUNDS):
        assert simulation.round().participants == DEVICES
    return method


class DeviceProcess:
    """A device that can be killed and started again."""

    def __init__(self, home: Path, place: int) -> None:
        self._command = [sys.executable, str(SCRIPT), str(home), str(place)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=10)
            self._process = None


@contextmanager
def enrolled(home: AggregatorHome, url: str, folder: Path) -> Iterator[list[Path]]:
    homes = []
    for place, code in enumerate(invite(home, DEVICES)):
        device = Device.enrol(url, code, folder / f"device-{place}", link_settings=QUICK)
        homes.append(device.home)
        device.close()
    yield homes


def version_of(home: AggregatorHome) -> int:
    store = home.open_store()
    checkpoint = store.checkpoints.get("version")
    store.database.close()
    return 0 if checkpoint is None else checkpoint.version


def await_version(home: AggregatorHome, version: int, seconds: float = 40.0) -> None:
    until = time.monotonic() + seconds
    while version_of(home) < version:
        assert time.monotonic() < until, version_of(home)
        time.sleep(0.02)


def test_killed_devices_and_a_killed_aggregator_make_the_simulators_model(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url)
    server = ServeProcess(home)
    server.start()
    said = []
    with ExitStack() as stack:
        stack.callback(server.kill)
        homes = stack.enter_context(enrolled(home, mosquitto.url, tmp_path))
        processes = [DeviceProcess(folder, place) for place, folder in enumerate(homes)]
        for process in processes:
            stack.callback(process.kill)
            process.start()
        await_version(home, 2)
        processes[0].kill()
        time.sleep(0.3)
        processes[0].start()
        await_version(home, 3)
        server.kill()
        processes[1].kill()
        processes[1].start()
        server.start()
        await_version(home, ROUNDS)
        until = time.monotonic() + 20
        for process, folder in zip(processes, homes, strict=True):
            while True:
                with Device.open(folder, read_only=True) as device:
                    status = device.status()
                if status.outbox == 0 and status.outcome == "read":
                    break
                assert time.monotonic() < until, status
                time.sleep(0.05)
            process.kill()
            assert (status.verdict, status.artifact, status.k) == ("counted", "linear", 1)
            assert (status.trained_round, status.version) == (ROUNDS, ROUNDS)
            with Device.open(folder, read_only=True) as device:
                said.append(device.predict({"x": local_data(0).train["x"]})["prediction"])
    store = home.open_store()
    checkpoint = store.checkpoints.get("version")
    rounds = {row.round: row.participants for row in store.rounds.latest(50) if row.threshold}
    store.database.close()
    assert rounds == dict.fromkeys(range(1, ROUNDS + 1), DEVICES)
    assert checkpoint is not None
    expected = simulated(tmp_path / "linear")
    np.testing.assert_allclose(
        checkpoint.state["model"], expected.state()["model"], rtol=1e-5, atol=1e-6
    )
    # The rounds are over: every device predicts with what all made.
    trainer = Trainer(tmp_path / "linear")
    trainer.set_parameters(expected.model)
    final = trainer.predict({"x": local_data(0).train["x"]})["prediction"]
    for each in said:
        np.testing.assert_allclose(each, final, rtol=1e-4, atol=1e-5)


def test_a_device_without_data_sits_out_and_predicts_once_it_has_some(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, rounds=40, pause=0.2)
    text = home.task_file.read_text().replace(f"= {DEVICES}\n", "= 1\n")
    home.task_file.write_text(text.replace("deadline_seconds = 60.0", "deadline_seconds = 5.0"))
    server = ServeProcess(home)
    server.start()
    (code,) = invite(home, 1)
    try:
        with Device.enrol(
            mosquitto.url, code, tmp_path / "device", pace=BRISK, link_settings=QUICK
        ) as device:
            device.start()
            until = time.monotonic() + 20
            while device.status().outcome != "declined":
                assert time.monotonic() < until, device.status()
                time.sleep(0.02)
            assert "given no data" in device.status().detail
            with pytest.raises(NothingLearnt, match="no round has been trained"):
                device.predict({"x": local_data(0).train["x"]})
            asked = []

            def source() -> LocalData:
                asked.append(time.monotonic())
                return local_data(len(asked))

            device.provide(source)
            while (device.status().trained_round or 0) < 3:
                assert time.monotonic() < until, device.status()
                time.sleep(0.02)
            assert len(asked) >= 2  # asked at the start of each round
            said = device.predict({"x": local_data(0).train["x"]})["prediction"]
            assert said.shape == (10, 3) and np.isfinite(said).all()
            device.stop()
            said = device.predict({"x": local_data(0).train["x"]})["prediction"]
        with Device.open(tmp_path / "device", read_only=True) as again:
            kept = again.predict({"x": local_data(0).train["x"]})["prediction"]
            np.testing.assert_array_equal(kept, said)  # what was learnt outlives the process
    finally:
        server.kill()
