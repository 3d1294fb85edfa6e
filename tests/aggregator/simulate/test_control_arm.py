"""Some devices train a second model alone, and the difference says what federation brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.errors import TaskError
from aggregator.evaluation import FLEET, Figure, serves, what_it_brings, what_serves
from aggregator.operate.runs import SimulationRecord
from aggregator.simulate.devices import ArrayDevices, DeviceSettings
from aggregator.simulate.fleet import CapabilityClass, Failures, Speeds, VirtualFleet
from aggregator.simulate.record import Asked, Recorder
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.task.file import read_task
from device_sdk import Trainer
from device_sdk.artifact.load import rung_folders
from device_sdk.local_data import LocalData
from device_sdk.methods.local_steps import Epochs, restore_trainer, train_epochs
from device_sdk.system.clock import MonotonicClock
from export.losses import cross_entropy

DEVICES, FEATURES, CLASSES, ROUNDS = 40, 12, 4, 8
Arrays = dict[str, Any]


def drawn(place: int, count: int, rule: int) -> Arrays:
    """Samples whose label is the largest of ``rule``'s linear functions."""
    x = np.random.default_rng([place, count]).standard_normal((count, FEATURES), dtype=np.float32)
    weights = np.random.default_rng([rule, 5]).standard_normal((FEATURES, CLASSES))
    return {"x": x, "label": (x @ weights).argmax(axis=1)}


def alike(devices: int, rng: np.random.Generator) -> list[LocalData]:
    """All devices see the same rule, each by a few samples."""
    return [LocalData(drawn(d, 12, 0), test=drawn(d, 60, 0)) for d in range(devices)]


def unlike(devices: int, rng: np.random.Generator) -> list[LocalData]:
    """Each has a rule of its own, and samples enough for it."""
    return [LocalData(drawn(d, 120, d), test=drawn(d, 60, d)) for d in range(devices)]


def loss(model: nn.Module, batch: dict[str, Any]) -> Any:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["label"]), {"logits": logits}


def example() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(each) for name, each in drawn(0, 6, 0).items()}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "net"
    torch.manual_seed(0)
    export.train_step(
        nn.Linear(FEATURES, CLASSES), loss, example(), optimizer=export.Sgd(lr=0.3), verify=False,
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}}, directory=folder,
        metrics={"accuracy": ("logits", "label"), "loss": "loss"},
    )  # fmt: skip
    return folder


def played(
    folder: Path,
    artifact: Path,
    given: Callable[..., object],
    evaluation: str,
    speeds: Speeds = Speeds(),  # noqa: B008
) -> tuple[TaskSimulation, ArrayDevices, list[PlayedRound]]:
    (folder / "task.toml").write_text(
        f'[task]\nname = "t"\nmethod = "fedavg"\nartifact = "{artifact}"\n'
        "[fedavg.training]\nepochs = 3\nbatch_size = 12\n"
        f"[evaluation]\n{evaluation}\n"
    )
    fleet = VirtualFleet(DEVICES, 1, speeds)
    where = f"{__name__}:{given.__name__}"
    settings = DeviceSettings(read_task(folder / "task.toml"), where, fleet)
    devices = settings.make()
    assert isinstance(devices, ArrayDevices)
    simulation = TaskSimulation(settings, devices)
    return simulation, devices, list(simulation.rounds(ROUNDS))


def figure(rounds: list[PlayedRound], stage: str, part: str = FLEET) -> Figure:
    found = {(f.stage, f.part): f for f in rounds[-1].figures if f.metric == "accuracy"}
    return found[stage, part]  # type: ignore[index]


def test_a_rule_that_all_share_is_what_federation_brings(tmp_path: Path, artifact: Path) -> None:
    *_, rounds = played(tmp_path, artifact, alike, "control = 0.5")
    personal, shared, alone = (figure(rounds, each) for each in ("personal", "global", "alone"))
    # Twelve samples draw a device away from a rule that all share.
    assert serves(rounds[-1].figures, "accuracy") == "global"
    better = -personal.over_received
    assert better == pytest.approx(shared.value - personal.value)  # all of as many samples
    assert f"devices predict with the shared model: {100 * better:.1f} points (" in what_serves(
        rounds[-1].figures, "accuracy"
    )
    assert 12 <= personal.control_devices == alone.devices < 30  # of 40, by their names
    assert personal.devices == DEVICES and alone.control_devices == 0
    assert shared.over_alone > personal.over_alone > 0.05
    low = shared.over_alone - shared.over_alone_half_width
    assert 0 < low < shared.over_alone
    assert what_it_brings(rounds[-1].figures, "accuracy").startswith(
        f"federation brings {100 * shared.over_alone:.1f} points ({100 * low:.1f} to "
    )
    whole = played(tmp_path, artifact, alike, "control = 1.0")[2]
    assert figure(whole, "personal").control_devices == DEVICES


@pytest.mark.parametrize(("given", "stage"), [(alike, "global"), (unlike, "personal")])
def test_the_record_tells_which_model_the_sentence_is_of(
    tmp_path: Path, artifact: Path, given: Callable[..., object], stage: str
) -> None:
    *_, rounds = played(tmp_path, artifact, given, "control = 0.5")
    asked = Asked("", DEVICES, ROUNDS, (1,), "", Failures(), 1.0)
    task = read_task(tmp_path / "task.toml")
    recorder = Recorder("r", task, asked, tmp_path / "runs", MonotonicClock(), lambda: 1.8e9)
    recorder.begin(1)
    for each in rounds:
        recorder.add(1, each)
    path = recorder.write()
    assert path is not None
    told, said = SimulationRecord.read(path).over_alone(0)[ROUNDS - 1], figure(rounds, stage)
    assert (told.stage, told.mean) == (stage, said.over_alone)
    assert (told.high - told.low) / 2 == pytest.approx(said.over_alone_half_width)


def test_rules_of_their_own_are_learnt_better_alone(tmp_path: Path, artifact: Path) -> None:
    *_, rounds = played(tmp_path, artifact, unlike, "control = 0.5")
    assert figure(rounds, "global").over_alone < -0.2
    assert serves(rounds[-1].figures, "accuracy") == "personal"
    said = what_it_brings(rounds[-1].figures, "accuracy")
    assert said.startswith(("federation costs", "federation brings nothing yet"))
    less_loss = what_it_brings(rounds[-1].figures, "loss")
    assert "points" not in less_loss and "the same devices alone" in less_loss


def test_what_is_exchanged_is_the_same_with_a_control_arm(tmp_path: Path, artifact: Path) -> None:
    found = [
        played(tmp_path, artifact, alike, f"control = {share}")[0].model_sha256
        for share in (0.0, 0.5)
    ]
    assert found[0] == found[1]


def test_the_second_model_is_the_device_s_data_and_nothing_else(
    tmp_path: Path, artifact: Path
) -> None:
    _, devices, _ = played(tmp_path, artifact, alike, "control = 0.5")
    trainer = Trainer(artifact, providers="cpu", threads=1)
    compared = 0
    for device in range(DEVICES):
        kept = {
            n: a for n, a in (devices._states.get(device) or {}).items() if "second model." in n
        }
        if not kept:
            continue
        # All samples are in each batch: no order of them matters but to the last bits.
        trainer.reset()
        for _ in range(ROUNDS):
            data = alike(DEVICES, np.random.default_rng(0))[device]
            train_epochs(trainer, data.train, Epochs(12, 3), np.random.default_rng(0))
        alone = trainer.parameters
        assert kept.pop("second model.rounds") == ROUNDS
        restore_trainer(trainer, kept, "second model.")
        for name, array in trainer.parameters.items():
            np.testing.assert_allclose(array, alone[name], atol=1e-5)
        compared += 1
    assert compared > 10


def test_a_control_arm_of_a_ladder_begins_with_its_first_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model.append(nn.Linear(32, CLASSES))
    export.submodels(
        model, loss, example(), ranks=(1 / 8, 1), optimizer=export.Sgd(lr=0.3), verify=False,
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}}, directory=tmp_path / "net",
        metrics={"accuracy": ("logits", "label")},
    )  # fmt: skip
    names = [each.name for each in rung_folders(tmp_path / "net")]
    speeds = Speeds(tuple(CapabilityClass(name, artifact=name) for name in names))
    _, _, rounds = played(tmp_path, tmp_path / "net", alike, "control = 1.0", speeds)
    assert [each.counted for each in rounds] == [DEVICES] * ROUNDS, rounds[-1].failure
    for name in names:
        found = figure(rounds, "alone", name)
        assert found.devices == DEVICES // 2 and found.value > 1.5 / CLASSES
        assert figure(rounds, "global", name).control_devices == DEVICES // 2
    # They fetch the first values once.
    assert rounds[0].down_bytes > rounds[1].down_bytes


@pytest.mark.parametrize("share", [-0.1, 1.5, '"a fifth"'])
def test_a_share_that_is_none_is_refused(tmp_path: Path, artifact: Path, share: object) -> None:
    with pytest.raises(TaskError, match=r"evaluation.control"):
        played(tmp_path, artifact, alike, f"control = {share}")


def test_a_method_without_steps_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("a\nb\n")
    (tmp_path / "task.toml").write_text(
        '[task]\nname = "t"\ncatalogue = "items.txt"\n[evaluation]\ncontrol = 0.1\n'
    )
    with pytest.raises(TaskError, match="scatter has no control arm: alone, a device has vectors"):
        read_task(tmp_path / "task.toml")


def test_too_few_for_a_figure_is_said(tmp_path: Path, artifact: Path) -> None:
    *_, rounds = played(tmp_path, artifact, alike, "control = 0.02")
    said = what_it_brings(rounds[-1].figures, "accuracy")
    assert "of the control arm's devices evaluated this version, too few" in said
    *_, none = played(tmp_path, artifact, alike, "control = 0")
    assert what_it_brings(none[-1].figures, "accuracy") == ""
