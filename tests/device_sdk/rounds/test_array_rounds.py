"""Methods on local arrays over a real broker: the aggregator's program, devices, and deaths."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import export
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from benchmarks.simulation import Simulation
from device_sdk import Trainer
from device_sdk.artifact import Manifest, load_artifact
from device_sdk.device import Device
from device_sdk.errors import NothingLearnt
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from export.losses import PENALTY, distillation, example_teachers
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import classed_data, labelled_data, local_data
from tests.fakes.handmade import FEATURES, TARGETS, frozen_artifact, linear_artifact
from tests.fakes.homes import ServeProcess, invite
from tests.fakes.killed_rounds import (
    DEVICES,
    ROUNDS,
    final_state,
    make_home,
    run_with_deaths,
)
from tests.fakes.quick import joined
from tests.fakes.waiting import NEVER_SECONDS, wait_until

TRAINING = FedAvgTraining(epochs=2, batch_size=0, learning_rate=0.1)


def simulated(folder: Path, training: FedAvgTraining) -> FedAvgMethod:
    """The same rounds without broker, seals, processes and deaths."""
    artifact = load_artifact(folder)
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    parameters, buffers = (
        {name: array for name, array in artifact.initial.items() if kinds[name] == kind}
        for kind in ("parameter", "buffer")
    )
    settings = FedAvgSettings(training=training)
    method = FedAvgMethod(parameters, buffers, settings, artifact.manifest.frozen_members)
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


@pytest.mark.parametrize(
    ("write", "training"),
    [
        (linear_artifact, TRAINING),
        # What a device keeps between rounds has the frozen state in it, too.
        (frozen_artifact, replace(TRAINING, optimizer_state="kept")),
    ],
    ids=["all trained", "some frozen"],
)
def test_killed_devices_and_a_killed_aggregator_make_the_simulators_model(
    write: Callable[[Path], Manifest],
    training: FedAvgTraining,
    mosquitto: Mosquitto,
    tmp_path: Path,
) -> None:
    manifest = write(tmp_path / "linear")
    home = make_home(tmp_path, mosquitto.url, method="fedavg", settings=asdict(training))
    homes, states = run_with_deaths(home, mosquitto.url, tmp_path, "measured")
    for status in states:
        assert (status.verdict, status.artifact, status.k) == ("counted", "linear", 1)
        assert (status.trained_round, status.version) == (ROUNDS, ROUNDS)
    expected = simulated(tmp_path / "linear", training)
    np.testing.assert_allclose(
        final_state(home)["model"], expected.state()["model"], rtol=1e-5, atol=1e-6
    )
    # The rounds are over: every device predicts with what all made.
    trainer = Trainer(tmp_path / "linear")
    assert not manifest.frozen_members & set(expected.model), "it came with the artifact"
    trainer.set_parameters(expected.model)
    final = trainer.predict({"x": local_data(0).train["x"]})["prediction"]
    for folder in homes:
        with Device.open(folder, read_only=True) as device:
            said = device.predict({"x": local_data(0).train["x"]})["prediction"]
        np.testing.assert_allclose(said, final, rtol=1e-4, atol=1e-5)


def write_student(folder: Path) -> None:
    """A linear softmax that learns from teachers."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, FEATURES), "label": torch.arange(5) % TARGETS}
    export.train_step(
        torch.nn.Linear(FEATURES, TARGETS),
        distillation(lambda model, b: model(b["x"])),
        {**batch, **example_teachers(TARGETS)},
        optimizer=export.Sgd(lr=0.1),
        dynamic={name: {0: "batch"} for name in batch},
        predict=lambda model, b: {"probabilities": torch.softmax(model(b["x"]), -1)},
        gradient=PENALTY,
        directory=folder,
        verify=False,
    )


@pytest.mark.slow
def test_killed_teachers_are_summed_once_a_round_and_their_students_trained_once(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    training = TeacherLogitsTraining(
        TARGETS, epochs=2, learning_rate=0.5, weights="samples", precision="float32"
    )
    write_student(tmp_path / "linear")
    home = make_home(
        tmp_path, mosquitto.url, method="teacher_logits", settings=training.as_scalars()
    )
    homes, states = run_with_deaths(home, mosquitto.url, tmp_path, "labelled")
    for status in states:
        assert (status.verdict, status.trained_round) == ("counted", ROUNDS)
    method = TeacherLogitsMethod(training)
    learners = [
        TeacherLogitsLearner(
            lambda place=place: labelled_data(place),  # type: ignore[misc]
            Trainer(tmp_path / "linear"),
            "",
            np.random.default_rng(place),
        )
        for place in range(DEVICES)
    ]
    simulation = Simulation(method, learners, np.random.default_rng(1))
    for _ in range(ROUNDS):
        assert simulation.round().participants == DEVICES
    found, expected = final_state(home), method.state()
    # Whole numbers: a sample lost, or counted twice, would show.
    for name in ("known_weights", "known_devices"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_allclose(found["known_sums"], expected["known_sums"], rtol=1e-4)
    for place, folder in enumerate(homes):
        x = {"x": labelled_data(place).train["x"]}
        with Device.open(folder, read_only=True) as device:
            said = device.predict(x)["probabilities"]
        alone = learners[place].trainer.predict(x)["probabilities"]
        np.testing.assert_allclose(said, alone, rtol=1e-3, atol=1e-5)


def test_a_device_without_data_sits_out_and_predicts_once_it_has_some(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    linear_artifact(tmp_path / "linear")
    home = make_home(tmp_path, mosquitto.url, 40, 0.2, method="fedavg", settings=asdict(TRAINING))
    text = home.task_file.read_text().replace(f"= {DEVICES}\n", "= 1\n")
    home.task_file.write_text(
        text.replace(f"deadline_seconds = {NEVER_SECONDS}", "deadline_seconds = 5.0")
    )
    server = ServeProcess(home)
    server.start()
    (code,) = invite(home, 1)
    try:
        with joined(mosquitto.url, code, tmp_path / "device") as device:
            device.start()
            wait_until(lambda: device.status().outcome == "declined", device.status)
            assert "given no data" in device.status().detail
            with pytest.raises(NothingLearnt, match="no round has been trained"):
                device.predict({"x": local_data(0).train["x"]})
            asked = []

            def source() -> LocalData:
                asked.append(time.monotonic())
                return local_data(len(asked))

            device.provide(source)
            wait_until(lambda: (device.status().trained_round or 0) >= 3, device.status)
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


def test_no_update_is_sent_of_labels_that_are_no_class(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, FEATURES), "y": torch.arange(5) % TARGETS}
    export.train_step(
        torch.nn.Linear(FEATURES, TARGETS),
        lambda model, b: torch.nn.functional.cross_entropy(model(b["x"]), b["y"]),
        batch,
        optimizer=export.Sgd(lr=0.1),
        dynamic={name: {0: "batch"} for name in batch},
        directory=tmp_path / "linear",
        verify=False,
    )
    home = make_home(tmp_path, mosquitto.url, 40, 0.2, method="fedavg", settings=asdict(TRAINING))
    text = home.task_file.read_text().replace(f"= {DEVICES}\n", "= 1\n")
    home.task_file.write_text(
        text.replace(f"deadline_seconds = {NEVER_SECONDS}", "deadline_seconds = 5.0")
    )
    good = classed_data(0)
    wrong = LocalData({**good.train, "y": np.where(np.arange(12) == 7, TARGETS, good.train["y"])})
    server = ServeProcess(home)
    server.start()
    (code,) = invite(home, 1)
    try:
        with joined(mosquitto.url, code, tmp_path / "device", data=wrong) as device:
            device.start()
            wait_until(lambda: device.status().outcome == "failed", device.status)
            status = device.status()
            assert "labels that are no class" in status.detail
            assert status.verdict != "counted"
            # Why is told, and nothing that was learnt of them.
            assert not any(row.body for row in device._home.rounds.outbox())
            device.provide(good)
            wait_until(lambda: device.status().verdict == "counted", device.status)
    finally:
        server.kill()
