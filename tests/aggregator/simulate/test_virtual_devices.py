"""A virtual device is a real one: the same data and draws give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from aggregator.errors import AggregatorError
from aggregator.simulate.devices import (
    ArrayDevices,
    Chosen,
    DeviceAnswer,
    DeviceSettings,
    ScatterDevices,
    device_id,
)
from aggregator.simulate.fleet import CapabilityClass, Speeds, StreamPurpose, VirtualFleet
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.simulate.traffic import PublishedRound
from aggregator.task.artifacts import read_artifact
from aggregator.task.file import read_catalogue_file, read_task
from device_sdk.evaluation.report import write_evaluations
from device_sdk.factorisation import packaged_artifact
from device_sdk.home.home import Home
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.rounds.current_round import commit_round
from device_sdk.train.arrays import ArrayTrainer
from device_sdk.train.job import LocalArtifact, RoundTrainer, TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from tests.fakes.array_device import local_data
from tests.fakes.handmade import linear_artifact
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

SEED, ITEMS, ROUNDS = 7, 30, 3
WIDTHS = (2, 8, 5)


def interactions(devices: int, rng: np.random.Generator) -> list[object]:
    """One user, two, one whose items are ids, one with a single item, and one with none."""
    drawn = [rng.choice(ITEMS, size=8, replace=False) for _ in range(6)]
    whole: list[object] = [
        drawn[0],
        {"anna": drawn[1], "bert": drawn[2][:3]},
        [f"i{row}" for row in drawn[3]] + ["unknown"],
        drawn[4][:1],
        {"nobody": []},
    ]
    return whole[:devices]


def arrays(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [LocalData(local_data(place).train, holdout=0.3) for place in range(devices)]


def nothing(devices: int, rng: np.random.Generator) -> list[LocalData]:
    empty = {name: array[:0] for name, array in local_data(0).train.items()}
    return [LocalData(empty)] * devices


def scatter_settings(folder: Path, devices: int = 5, more: str = "") -> DeviceSettings:
    (folder / "items.txt").write_text("".join(f"i{row}\n" for row in range(ITEMS)))
    (folder / "task.toml").write_text(
        '[task]\nname = "t"\ncatalogue = "items.txt"\n[scatter]\ncolumns = 8\n'
        f"[evaluation]\nleast_devices = 1\n{more}"
    )
    speeds = Speeds.read(f"k:{','.join(map(str, WIDTHS))}")
    fleet = VirtualFleet(devices, SEED, speeds)
    return DeviceSettings(read_task(folder / "task.toml"), f"{__name__}:interactions", fleet)


def array_settings(
    folder: Path, devices: int = 4, personal: str = "", control: float = 0.0
) -> DeviceSettings:
    linear_artifact(folder / "linear", "rmse")
    (folder / "task.toml").write_text(
        '[task]\nname = "t"\nmethod = "fedavg"\nartifact = "linear"\n[round]\nshare = 0.9\n'
        f"[fedavg.training]\nepochs = 2\nbatch_size = 4\n{personal}"
        f"[evaluation]\nleast_devices = 1\ncontrol = {control}\n"
    )
    task = read_task(folder / "task.toml")
    return DeviceSettings(task, f"{__name__}:arrays", VirtualFleet(devices, SEED))


class Watched:
    """Virtual devices whose rounds are kept."""

    def __init__(self, settings: DeviceSettings) -> None:
        self.inner = settings.make()
        self.rounds: list[tuple[PublishedRound, list[DeviceAnswer]]] = []

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> list[DeviceAnswer]:
        answers = list(self.inner.round(published, chosen))
        self.rounds.append((published, answers))
        return answers

    def settle(self, number: int, counted: dict[int, bool]) -> None:
        self.inner.settle(number, counted)


def played(settings: DeviceSettings, rounds: int = ROUNDS) -> Watched:
    devices = Watched(settings)
    simulation = TaskSimulation(settings, devices)  # type: ignore[arg-type]
    assert [each.counted > 0 for each in simulation.rounds(rounds)] == [True] * rounds
    return devices


def trained(
    home: Home, device: int, trainer: RoundTrainer, job: TrainingJob
) -> tuple[bytes, bytes]:
    """Body and evaluation of a real device, which commits what it keeps."""
    result = trainer.train(job)
    commit_round(home, device_id(device), job, result)
    found = b"" if result.evaluation is None else write_evaluations(result.evaluation)
    return result.body, found


def rng_of(published: PublishedRound, device: int) -> np.random.Generator:
    return np.random.default_rng([SEED, int(StreamPurpose.TRAIN), published.manifest.round, device])


def test_what_runs_artifacts_is_what_was_asked_for(tmp_path: Path) -> None:
    asked = replace(array_settings(tmp_path), providers="cpu")
    devices = played(asked, 1).inner
    assert isinstance(devices, ArrayDevices)
    used = {trainer.providers for trainer in devices._trainers.values()}
    assert used == {("CPUExecutionProvider",)} and devices.reports() == ()


def test_why_a_provider_was_left_is_told(tmp_path: Path) -> None:
    devices = played(array_settings(tmp_path), 1).inner
    assert isinstance(devices, ArrayDevices)
    for trainer in devices._trainers.values():
        trainer._report = "left for the CPU"
    assert devices.reports() == ("left for the CPU",)


def test_scatter_devices_send_what_real_ones_send(tmp_path: Path) -> None:
    settings = scatter_settings(tmp_path)
    catalogue = read_catalogue_file(tmp_path / "items.txt")
    artifact = LocalArtifact(bytes(32), "mf", packaged_artifact())
    rounds = played(settings).rounds
    for device, entry in enumerate(settings.entries()):
        with closing(Home(tmp_path / f"home{device}", create=True)) as home:
            users = entry if isinstance(entry, dict) else {"": entry}
            pairs = [
                (user or "me", item if isinstance(item, str) else f"i{item}")
                for user, items in users.items()
                for item in items
            ]
            home.interactions.add(pairs)
            for published, answers in rounds:
                answer = answers[device]
                width = int(answer.option.removeprefix("k="))
                assert width == settings.fleet.class_of(device).k
                world = world_of(
                    home, device_id(device), rng_of(published, device), StepClock(), None, k=width
                )
                terms, broadcast = published.read()
                job = TrainingJob(published.manifest, terms, broadcast, catalogue, (artifact,))
                body, found = trained(home, device, ScatterTrainer(world), job)
                assert (body, found) == (answer.body, answer.evaluation)


@pytest.mark.parametrize(
    ("personal", "control"), [("", 0.0), ('personal = "linear.bias"\n', 0.0), ("", 0.5)]
)
def test_array_devices_send_what_real_ones_send(
    tmp_path: Path, personal: str, control: float
) -> None:
    settings = array_settings(tmp_path, personal=personal, control=control)
    content = read_artifact(tmp_path / "linear")
    artifact = LocalArtifact(content.artifact_id, "linear", tmp_path / "linear")
    rounds = played(settings).rounds
    entries = settings.entries()
    homes = [Home(tmp_path / f"home{device}", create=True) for device in range(len(entries))]
    for published, answers in rounds:
        for answer in answers:
            device = answer.device
            rng = rng_of(published, device)
            world = world_of(
                homes[device],
                device_id(device),
                rng,
                StepClock(),
                lambda device=device: entries[device],  # type: ignore[misc]
            )
            trainer = ArrayTrainer(world, FedAvgLearner)
            # A real device draws the seed of its dropout where a virtual one is given it.
            trainer._trainer(artifact.folder)
            rng.bit_generator.state = rng_of(published, device).bit_generator.state
            terms, broadcast = published.read()
            job = TrainingJob(published.manifest, terms, broadcast, None, (artifact,))
            assert trained(homes[device], device, trainer, job) == (answer.body, answer.evaluation)
    for home in homes:
        home.close()


def test_what_is_kept_and_what_is_packed_give_the_same_bits(tmp_path: Path) -> None:
    settings = scatter_settings(tmp_path)
    found = []
    for devices in (ScatterDevices(settings), ScatterDevices(settings, kept_bytes=0)):
        simulation = TaskSimulation(settings, devices)
        rounds = [each.figures for each in simulation.rounds(ROUNDS)]
        found.append((simulation.model_sha256, [len(each) for each in rounds]))
    assert found[0] == found[1]


def test_a_device_without_data_that_fits_fails_alone(tmp_path: Path) -> None:
    settings = array_settings(tmp_path)
    devices = ArrayDevices(settings, FedAvgLearner)
    wrong = LocalData({"x": np.zeros((3, 1), np.float32), "y": np.zeros((3, 1), np.float32)})
    devices._entries = [wrong, *arrays(4, np.random.default_rng(0))[1:]]
    (first, *_) = TaskSimulation(settings, devices).rounds(1)
    assert dict(first.failed) == {"bad-data": 1} and first.counted == first.selected - 1
    assert first.failure.startswith("device 0: ")


def test_a_class_of_another_kind_of_method_is_refused(tmp_path: Path) -> None:
    columns = Speeds.read("k:2,4")
    model = Speeds((CapabilityClass("weak", artifact="small"),))
    for settings, speeds, said in (
        (
            array_settings(tmp_path),
            columns,
            "'k=2' has k; a device of this task trains an",
        ),
        (scatter_settings(tmp_path), model, "'weak' has artifact; a device of this task trains co"),
    ):
        fleet = replace(settings.fleet, speeds=speeds)
        with pytest.raises(AggregatorError, match=said):
            replace(settings, fleet=fleet).make()
    unknown = replace(array_settings(tmp_path), fleet=VirtualFleet(3, 0, model))
    with pytest.raises(AggregatorError, match="'small'; the task has linear"):
        unknown.make()


def test_a_fleet_shares_a_session_for_each_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    kept = ort.InferenceSession

    def counted(graph: bytes, *options: object, **more: object) -> ort.InferenceSession:
        opened.append(hashlib.sha256(graph).hexdigest())
        return kept(graph, *options, **more)

    monkeypatch.setattr(ort, "InferenceSession", counted)
    played(array_settings(tmp_path, devices=20))
    assert len(opened) == len(set(opened)) == 2  # it trains and it is evaluated


def test_a_fleet_without_a_sample_is_refused(tmp_path: Path) -> None:
    settings = replace(array_settings(tmp_path), data=f"{__name__}:nothing")
    with pytest.raises(AggregatorError, match="none of the 4 devices has a sample to train on"):
        settings.make()
