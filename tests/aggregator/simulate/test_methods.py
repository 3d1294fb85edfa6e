"""Methods whose devices hand on more than an update: attachments, receipts, states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

import export
from aggregator.simulate.devices import ArrayDevices, DeviceSettings
from aggregator.simulate.fleet import Failures, VirtualFleet
from aggregator.simulate.task_rounds import PlayedRound, TaskSimulation
from aggregator.task.file import read_task
from device_sdk.local_data import LocalData
from export.build import Recipe
from export.losses import (
    PENALTY,
    cross_entropy,
    distillation,
    example_prototypes,
    example_teachers,
    prototype_alignment,
)
from export.models.attention_meta import attention_recipe
from tests.fakes.array_device import labelled_data, shared_data
from tests.fakes.handmade import FEATURES, TARGETS
from tests.fakes.mutual_artifact import write_mutual_artifact

DEVICES = 4
CLASSES = f"classes = {TARGETS}\n"
MUTUAL = f"{CLASSES}local_steps = 2\npublic_batch = 8"


def shared(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [shared_data(place) for place in range(devices)]


def labelled(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [labelled_data(place) for place in range(devices)]


def played(
    folder: Path, method: str, training: str, failures: Failures | None = None, more: str = ""
) -> tuple[list[PlayedRound], ArrayDevices, TaskSimulation]:
    (folder / "task.toml").write_text(
        f'[task]\nname = "t"\nmethod = "{method}"\nartifact = "model"\n{more}\n'
        f"[{method}.training]\n{training}\n"
    )
    data = f"{__name__}:{'shared' if method == 'mutual' else 'labelled'}"
    fleet = VirtualFleet(DEVICES, 1, failures=failures or Failures())
    settings = DeviceSettings(read_task(folder / "task.toml"), data, fleet)
    devices = settings.make()
    assert isinstance(devices, ArrayDevices)
    simulation = TaskSimulation(settings, devices)
    return list(simulation.rounds(4)), devices, simulation


def test_public_samples_are_fetched_once_and_soft_labels_as_they_change(tmp_path: Path) -> None:
    write_mutual_artifact(tmp_path / "model")
    rounds, devices, again = played(tmp_path, "mutual", MUTUAL)
    assert [each.counted for each in rounds] == [DEVICES] * 4
    first, *_, last = (each.down_bytes for each in rounds)
    assert last > first  # attachments come in the end
    assert devices._states.nbytes > 0
    assert played(tmp_path, "mutual", MUTUAL)[2].model_sha256 == (again.model_sha256)


def test_a_learner_that_needs_receipts_hears_what_was_counted(tmp_path: Path) -> None:
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
        directory=tmp_path / "model",
        verify=False,
    )
    rounds, devices, _ = played(tmp_path, "teacher_logits", CLASSES, Failures(late=0.3))
    late = sum(each.late for each in rounds)
    assert late > 0 and not any(each.failed or each.refused for each in rounds)
    told = [counted for known in devices._receipts.values() for _, counted in known]
    assert told.count(False) == late and len(told) == DEVICES * 4


def write_embedding(folder: Path, width: int) -> None:
    """A layer of ``width`` embeds, another decides."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, FEATURES), "label": torch.arange(5) % TARGETS}

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(FEATURES, width)
            self.head = torch.nn.Linear(width, TARGETS)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embedding = torch.tanh(self.encoder(x))
            return embedding, self.head(embedding)

    export.train_step(
        Network(),
        prototype_alignment(lambda model, b: model(b["x"])),
        {**batch, **example_prototypes(TARGETS, width)},
        optimizer=export.Sgd(lr=0.1),
        dynamic={name: {0: "batch"} for name in batch},
        predict=lambda model, b: {
            "embedding": model(b["x"])[0],
            "probabilities": torch.softmax(model(b["x"])[1], -1),
        },
        directory=folder,
        verify=False,
    )


def test_prototypes_are_trained_from_what_devices_sent(tmp_path: Path) -> None:
    write_embedding(tmp_path / "model", 6)
    found = []
    for more in ("", "\n[prototypes]\ntrained = true\n"):
        training = f"{CLASSES}width = 6{more}"
        rounds, _, simulation = played(tmp_path, "prototypes", training, Failures(late=0.3))
        assert sum(each.late for each in rounds) > 0
        assert not any(each.failed or each.refused for each in rounds)
        again = played(tmp_path, "prototypes", training, Failures(late=0.3))[2]
        assert simulation.model_sha256 == again.model_sha256
        found.append(simulation.model_sha256)
    assert found[0] != found[1]


def test_a_device_mixes_with_the_companion_that_it_is_given(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, FEATURES), "label": torch.arange(5) % TARGETS}
    dynamic = {name: {0: "batch"} for name in batch}
    network = torch.nn.Linear(FEATURES, TARGETS)

    def loss(model: torch.nn.Module, b: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(b["x"]), b["label"])

    recipe = Recipe(network, loss, batch, dynamic, export.Sgd(lr=0.1))
    recipe.export(tmp_path / "model", verify=False)
    attention_recipe(recipe).export(tmp_path / "meta", verify=False)
    training = "warm_up_rounds = 1\nbase_steps = 2\naggregator_mixes = false"
    found = [
        played(tmp_path, "attention", training, more=more)
        for more in ('companions = ["meta"]', 'companions = ["meta"]', "")
    ]
    for rounds, _, _ in found:
        assert [(each.counted, each.failure) for each in rounds] == [(DEVICES, "")] * 4
    (mixed, devices, one), (_, _, again), (alone, _, other) = found
    assert one.model_sha256 == again.model_sha256 != other.model_sha256
    assert devices._trainers.keys() == {tmp_path / "model", tmp_path / "meta"}
    # Neighbours' vectors are fetched by those who mix for themselves.
    assert mixed[-1].down_bytes > alone[-1].down_bytes
