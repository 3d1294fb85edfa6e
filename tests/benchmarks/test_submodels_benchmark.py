"""Fleets that train parts of one model: a run, and how a row's setting is picked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from benchmarks.channels import MutualChannel
from benchmarks.harness import Artifacts
from benchmarks.simulation import Simulation, device_name
from benchmarks.submodels.__main__ import SubmodelSuite
from benchmarks.submodels.experiment import ROWS, Experiment, Fleet, Outcome, Setting, Tuned
from benchmarks.submodels.fleet import execute
from benchmarks.submodels.levers import Slowed, Teacher, untaught
from benchmarks.submodels.ordered_dropout import OrderedDropout
from benchmarks.submodels.own_networks import own_networks
from benchmarks.submodels.tasks import (
    SOFT,
    Dealt,
    Samples,
    auc,
    deal_clicks,
    write_adapters,
    write_clicks,
    write_pictures,
)
from device_sdk import LocalData, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.load import rung_folders
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.local_steps import predict_all
from tests.benchmarks.made_up_movielens import made_up_movielens

TINY = Experiment(0, "clicks", 1.0, "unequal", "widths", 0.5, 0.03, 2, 50, 12, 2, 8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return Artifacts(tmp_path_factory.mktemp("artifacts"))


def test_each_class_is_judged_by_its_part_and_sends_no_more(
    tmp_path: Path, shelf: Artifacts
) -> None:
    root, told = made_up_movielens(tmp_path), list[str]()
    found = execute(TINY, root, shelf, told.append)
    assert found == replace(
        execute(TINY, root, shelf, told.append), milliseconds=found.milliseconds
    )
    assert len({*found.test}) == 4 and found.failed == 0
    assert [*found.up_bytes] == sorted({*found.up_bytes}) and found.up_bytes[0] > 0
    alone = execute(replace(TINY, fleet="alone", server=0.0), root, shelf, told.append)
    assert alone.up_bytes == (0.0,) * 4 and all(0 < each < 1 for each in alone.test)


def test_every_kind_of_fleet_is_another(tmp_path: Path, shelf: Artifacts) -> None:
    root, found = made_up_movielens(tmp_path), {}
    for changes in (
        {"slices": "rolling"}, {"slices": "dealt"}, {"slices": "ranked"}, {},
        {"fleet": "fjord"}, {"fleet": "pooled", "server": 0.0}, {"fleet": "frozen"},
    ):  # fmt: skip
        run = replace(TINY, **changes)
        found[run.slices, run.fleet] = execute(run, root, shelf, lambda _: None)
    again = execute(replace(TINY, fleet="fjord"), root, shelf, lambda _: None)
    one = found["static", "fjord"]
    assert again == replace(one, milliseconds=again.milliseconds) and one.failed == 0
    assert len({one.test for one in found.values()}) == len(found)
    assert found["static", "frozen"].round == 0 < found["static", "fjord"].round
    assert len({*found["static", "pooled"].test}) == 1
    assert found["static", "fjord"].up_bytes == found["static", "unequal"].up_bytes


def test_a_step_of_ordered_dropout_moves_the_first_units_alone(
    tmp_path: Path, shelf: Artifacts
) -> None:
    ladder = shelf.path("clicks", lambda folder: write_clicks("widths", 0, folder, {}))
    folders = rung_folders(ladder)
    smallest, full = (Trainer(folders[k], providers="cpu") for k in (0, -1))
    full.set_parameters({n: v + 0.01 for n, v in full.parameters.items()})
    dropout = OrderedDropout(folders[-1], [smallest], np.random.default_rng(0))
    dropout.set_parameters(full.parameters)
    batch = deal_clicks(made_up_movielens(tmp_path), TINY).timed
    moved = []
    for _ in range(6):
        before = dropout.parameters["hidden.weight"]
        dropout.step(batch, hyper={"lr": 0.1})
        moved.append(dropout.parameters["hidden.weight"] != before)
    rows, columns = smallest.parameters["hidden.weight"].shape
    small = [not each[rows:].any() and not each[:, columns:].any() for each in moved]
    assert all(each[:rows, :columns].any() for each in moved) and 0 < sum(small) < 6


@pytest.mark.parametrize("fleet", ["prototypes", "mutual"])
def test_classes_with_networks_of_their_own_exchange_what_they_see(
    fleet: Fleet, shelf: Artifacts
) -> None:
    rng, classes = np.random.default_rng(0), np.array([3, 0, 1, 2])
    run = Experiment(0, "digits", 1.0, fleet, "widths", 0.05, 0.0, 2, 4, 4, 3, 8)
    devices: list[Samples] = [
        {"x": rng.random((40, 1, 28, 28), np.float32), "label": np.arange(40) % 10} for _ in classes
    ]
    dealt = Dealt(devices, lambda *_: 0.0, {})
    method, learners, trainers = own_networks(run, dealt, shelf, classes)
    sizes = [sum(v.size for v in each.parameters.values()) for each in trainers]
    assert np.argsort(sizes).tolist() == np.argsort(classes).tolist()
    before = [each.parameters for each in trainers]
    simulation = Simulation(method, learners, rng, MutualChannel("float16", rng))
    for _ in range(2):
        assert simulation.round().participants == 4
    assert not simulation.failures
    for trainer, values in zip(trainers, before, strict=True):
        assert any((trainer.parameters[name] != value).any() for name, value in values.items())


def test_adapters_are_on_what_others_samples_taught(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 10, 400)
    # The place of a bright row says the class.
    x = np.zeros((400, 1, 28, 28), np.float32)
    x[np.arange(400), 0, 2 * label] = 1
    write_adapters("widths", 0, tmp_path / "ladder", {"x": x, "label": label})
    trainers = [Trainer(each, providers="cpu") for each in rung_folders(tmp_path / "ladder")]
    ranks = [len(each.parameters["patch.down"]) for each in trainers]
    assert ranks == [1, 2, 4, 8]
    for trainer in trainers:
        logits = predict_all(trainer, {"x": x}, "logits")
        assert (logits.argmax(1) == label).mean() > 0.9


def test_a_smaller_rung_is_taught_what_the_full_model_says(tmp_path: Path) -> None:
    rng, label = np.random.default_rng(0), np.arange(12) % 10
    samples: Samples = {"x": rng.random((12, 1, 28, 28), np.float32), "label": label}
    write_pictures("ranks", 0, tmp_path / "ladder", {}, taught=0.5, temperature=2.0)
    folders = rung_folders(tmp_path / "ladder")
    method = FedAvgBinding("fedavg", FedAvgSettings()).build(0, rng, [*map(load_artifact, folders)])

    def adopted(trainer: Trainer) -> Trainer:
        FedAvgLearner(lambda: LocalData({}), trainer, device_name(0), rng).adopt(method.tell())
        return trainer

    def soft(folder: Path) -> NDArray[np.float64]:
        logits = predict_all(adopted(Trainer(folder, providers="cpu")), samples, "logits")
        raised = np.exp(logits.astype(np.float64) / 2)
        return np.asarray(raised / raised.sum(1, keepdims=True))

    taught = Teacher(method, folders[-1], 2.0).teaches(samples)
    np.testing.assert_allclose(taught[SOFT], soft(folders[-1]), rtol=1e-4)
    losses, moved = [], []
    for share, given in ((1.0, untaught(samples)), (1.0, taught), (0.5, taught)):
        rung = adopted(Slowed(folders[0], share))
        before = rung.parameters["head.bias"]
        losses.append(rung.step(given, hyper={"lr": 0.1}))
        moved.append(rung.parameters["head.bias"] - before)
    apart = -(taught[SOFT] * np.log(soft(folders[0]))).sum(1).mean()
    assert losses[1] - losses[0] == pytest.approx(0.5 * 4 * apart, rel=1e-4)
    np.testing.assert_allclose(moved[2], moved[1] / 2, rtol=1e-3)
    assert (moved[0] != moved[1]).any()


def test_convolutions_may_stay_whole(tmp_path: Path) -> None:
    write_pictures("ranks", 0, tmp_path / "ladder", {}, whole=("first", "second"))
    submodel = load_artifact(rung_folders(tmp_path / "ladder")[0]).manifest.submodel
    assert submodel is not None
    assert {each.of for each in submodel.pieces.values()} == {"hidden.weight"}


class Made(SubmodelSuite):
    """Better the nearer the rate is to 0.2, on validation samples; on the others, the farther."""

    def execute(self, run: Experiment, *_: object) -> Outcome:
        off = abs(run.learning_rate - 0.2) + run.seed / 1000
        return Outcome(10, (1 - off,) * 4, (off,) * 4, (1e3,) * 4, (1e3,) * 4, (1.0,) * 4)


def test_validation_of_the_first_seed_picks_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--results", str(tmp_path), "--table", "air", "--rows", "all full;low rank"]
    suite = Made()
    suite.rows = tuple(replace(row, settings=(Setting(0.1), Setting(0.2))) for row in ROWS)
    assert suite.main([*given, "--table-only"]) == 0 and "low rank" not in capsys.readouterr().out
    picture = tmp_path / "quality.png"
    assert suite.main([*given, "--seeds", "3", "--picture", str(picture)]) == 0
    (line, *_) = (each for each in capsys.readouterr().out.splitlines() if "low rank" in each[:12])
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        "3", "0.0010 ± 0.0010", "+0.0 [+0.0, +0.0]"
    ]  # fmt: skip
    assert "| 0.2 " in line and picture.stat().st_size > 1000
    assert len((tmp_path / "submodels.jsonl").read_text().splitlines()) == 2 * (3 + 1)


def test_every_row_has_a_budget_of_six_settings_at_most() -> None:
    assert all(isinstance(row, Tuned) and 1 <= len(row.settings) <= 6 for row in ROWS)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    label, scores = np.array([1, 0, 1, 0]), np.array([0.9, 0.5, 0.5, 0.1], np.float32)
    assert auc(label, scores) == 0.875
    assert np.isnan(auc(label[:1], scores[:1]))
