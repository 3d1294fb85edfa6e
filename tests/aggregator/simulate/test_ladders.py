"""Fleets whose devices train unequal parts of one model, of each kind of rung."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import export
from aggregator.errors import AggregatorError
from aggregator.methods.fedavg import FedAvgMethod
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.fleet import CapabilityClass, Speeds, VirtualFleet
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.task.file import read_task
from device_sdk import Trainer
from device_sdk.artifact.load import rung_folders
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.learner import FedAvgLearner
from tests.fakes import personal_ladders
from tests.fakes.personal_ladders import CLASSES, FEATURES, samples

DEVICES, WIDTH = 6, 16


class Net(nn.Module):
    """A stem, residual blocks with norms over the batch, and a head."""

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found


def adapted(rank: int) -> nn.Module:
    torch.manual_seed(1)
    return export.lora(Net(), rank, trained=("head",))


def fewer(blocks: int) -> nn.Module:
    return Net(blocks=blocks)


def last(blocks: int) -> nn.Module:
    made = Net()
    made.stem.requires_grad_(blocks == 2)
    made.blocks[0].requires_grad_(blocks == 2)
    return made


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["label"]), {"logits": logits}


def data(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [LocalData(samples(place)) for place in range(devices)]


def shown(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [personal_ladders.shown(place) for place in range(devices)]


KINDS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "adapted": (adapted, (1, 4)),
    "fewer": (fewer, (1, 2)),
    "last": (last, (1, 2)),
    "narrower": (Net, (4, 16)),
}


@pytest.fixture(scope="module")
def ladders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a ladder of each kind."""
    folder = tmp_path_factory.mktemp("ladders")
    example = {name: torch.from_numpy(each) for name, each in samples(99, 4).items()}
    for name, (make, sizes) in KINDS.items():
        torch.manual_seed(1)
        export.submodels(
            make, loss, example, widths=sizes, optimizer=export.Sgd(lr=0.1), verify=False,
            dynamic={name: {0: "batch"} for name in example}, directory=folder / name,
        )  # fmt: skip
    return folder


def simulated(ladder: Path, folder: Path, settings: str = "", training: str = "") -> TaskSimulation:
    """The fleet, each rung trained by as many of its devices."""
    text = f'[task]\nname = "t"\nmethod = "fedavg"\nartifact = "{ladder}"\n[fedavg]\n{settings}\n'
    training = f"[fedavg.training]\nepochs = 2\nbatch_size = 10\n{training}\n"
    return simulated_task(folder, text + training, [each.name for each in rung_folders(ladder)])


def simulated_task(
    folder: Path, text: str, rungs: Sequence[str], given: Callable[..., object] = data
) -> TaskSimulation:
    """The fleet of a task with this text."""
    (folder / "task.toml").write_text(text)
    classes = tuple(CapabilityClass(name, artifact=name) for name in rungs)
    fleet = VirtualFleet(DEVICES, 1, Speeds(classes))
    where = f"{__name__}:{given.__name__}"
    device_settings = DeviceSettings(read_task(folder / "task.toml"), where, fleet)
    return TaskSimulation(device_settings, device_settings.make())


def accuracies(simulation: TaskSimulation, ladder: Path) -> list[float]:
    """Of what each rung's devices would serve now."""
    fresh, found = samples(98, 200), []
    for folder in rung_folders(ladder):
        trainer = Trainer(folder, providers="cpu")
        learner = FedAvgLearner(lambda: LocalData({}), trainer, "", np.random.default_rng(0))
        assert isinstance(simulation.method, FedAvgMethod)
        learner.adopt(simulation.method.tell())
        logits = trainer.predict({"x": fresh["x"]})["logits"]
        found.append(float((logits.argmax(axis=1) == fresh["label"]).mean()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet_of_unequal_devices_learns_one_model(
    kind: str, ladders: Path, tmp_path: Path
) -> None:
    simulation = simulated(ladders / kind, tmp_path)
    before = simulation.method.model_arrays
    rounds = list(simulation.rounds(4))
    assert [each.counted for each in rounds] == [DEVICES] * 4
    after = simulation.method.model_arrays
    assert before is not None and after is not None
    assert all((after[name] != before[name]).any() for name in before)
    assert min(accuracies(simulation, ladders / kind)) > 0.8


@pytest.mark.parametrize("kind", ["fewer", "last"])
def test_layers_may_be_personal_that_a_rung_lacks_or_holds(
    kind: str, ladders: Path, tmp_path: Path
) -> None:
    personal = 'personal = "blocks.0, blocks.1.2"'
    simulation = simulated(ladders / kind, tmp_path, training=personal)
    rounds = list(simulation.rounds(2))
    assert [each.counted for each in rounds] == [DEVICES] * 2, rounds[-1].failure
    arrays = simulation.method.model_arrays
    assert arrays is not None and not any(name.startswith("blocks.0") for name in arrays)


@pytest.mark.parametrize("kind", ["fewer", "narrower"])
@pytest.mark.parametrize("choice", ["ditto", "ala", "apfl"])
def test_devices_of_every_rung_may_have_a_model_of_their_own(
    choice: str, kind: str, ladders: Path, tmp_path: Path
) -> None:
    simulation = simulated(ladders / kind, tmp_path, training=f'personalise = "{choice}"')
    rounds = list(simulation.rounds(4))
    assert [each.counted for each in rounds] == [DEVICES] * 4, rounds[-1].failure
    assert min(accuracies(simulation, ladders / kind)) > 0.8


@pytest.mark.parametrize("slices", ["rolling", "dealt", "ranked"])
def test_slices_of_a_width_may_be_other_units_in_each_round(
    slices: str, ladders: Path, tmp_path: Path
) -> None:
    simulation = simulated(ladders / "narrower", tmp_path, f'slices = "{slices}"')
    rounds = list(simulation.rounds(6))
    assert [each.counted for each in rounds] == [DEVICES] * 6, rounds[-1].failure
    small, full = accuracies(simulation, ladders / "narrower")
    assert small > 0.5 and full > 0.9


@pytest.mark.parametrize("method", personal_ladders.TRAINING)
def test_each_device_keeps_a_part_of_one_model_as_its_own(method: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    rungs = personal_ladders.write_ladder(
        method, tmp_path / "net", personal_ladders.Net(), ranks=(1 / 8, 1)
    )
    names = [each.manifest.name for each in rungs]
    training = f"[{method}.training]\n{personal_ladders.TRAINING[method]}\n"
    text = f'[task]\nname = "t"\nmethod = "{method}"\nartifact = "net"\n{training}'
    given = shown if method == "mutual" else data
    simulation = simulated_task(tmp_path, text, names, given)
    rounds = list(simulation.rounds(4))
    assert [each.counted for each in rounds] == [DEVICES] * 4, rounds[-1].failure


@pytest.mark.parametrize("scale", [0.0, 0.03])
def test_matrices_that_begin_small_are_learnt_by_rungs_of_a_low_rank(
    scale: float, tmp_path: Path
) -> None:
    """Their singular values grow many times over while one device trains on one scale."""
    torch.manual_seed(1)
    inner = nn.Linear(64, 64)
    with torch.no_grad():
        inner.weight *= scale
    ends = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)
    model = nn.Sequential(ends[0], nn.ReLU(), inner, nn.ReLU(), ends[1])
    example = {name: torch.from_numpy(each) for name, each in samples(99, 4).items()}
    export.submodels(
        model, loss, example, ranks=(1 / 8, 1 / 4, 1), optimizer=export.Sgd(lr=0.2), verify=False,
        dynamic={name: {0: "batch"} for name in example}, directory=tmp_path / "net",
    )  # fmt: skip
    simulation = simulated(tmp_path / "net", tmp_path)
    rounds = list(simulation.rounds(3))
    assert [each.counted for each in rounds] == [DEVICES] * 3, rounds[0].failure
    assert rounds[0].metrics["loss"] < 1
    assert min(accuracies(simulation, tmp_path / "net")) > 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_a_rung_by_itself_is_a_model_that_all_train(
    kind: str, ladders: Path, tmp_path: Path
) -> None:
    name = rung_folders(ladders / kind)[0].name
    simulation = simulated(ladders / kind / name, tmp_path, training='personal = "head"')
    rounds = list(simulation.rounds(2))
    assert [each.counted for each in rounds] == [DEVICES] * 2, rounds[-1].failure


@pytest.mark.parametrize(
    ("kind", "settings", "training", "said"),
    [
        ("fewer", "", 'personal = "haed"', "'haed' names no parameter"),
        ("fewer", 'slices = "rolling"', "", "no rung of the model has slices that may lie any"),
        ("narrower", 'slices = "rolling"', 'personal = "head"', "'head' is personal"),
        ("narrower", 'slices = "dealt"', 'optimizer_state = "kept"', "devices keep momenta"),
        ("narrower", 'slices = "rolling"', 'personalise = "ditto"', "keep a model of their own"),
        ("fewer", "", 'personalise = "dito"', "personalise is 'dito'; expected one of"),
        ("fewer", "", 'personalise = "ala"\nmixed = "haed"', "mixed is 'haed', which names no"),
        ("fewer", "", 'personalise = "apfl"\npersonal = "head"', "give one of the two"),
    ],
)
def test_settings_that_do_not_go_with_the_ladder_are_refused(
    kind: str, settings: str, training: str, said: str, ladders: Path, tmp_path: Path
) -> None:
    with pytest.raises(AggregatorError, match=said):
        simulated(ladders / kind, tmp_path, settings, training)
