"""Whole fleets of methods whose devices fetch from each other, as the examples start them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import export
from aggregator.demo.broker import mosquitto_path
from aggregator.demo.child import FleetError
from aggregator.demo.fleet import FleetMember, FleetTask, local_fleet
from device_sdk import LocalData, TrainingOptions
from export.build import Recipe
from export.models.attention_meta import attention_recipe
from tests.fakes.mutual_artifact import CLASSES, samples, write_mutual_artifact
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS

Batch = dict[str, torch.Tensor]
FEATURES = 4
DYNAMIC = {"x": {0: "batch"}, "label": {0: "batch"}}

pytestmark = pytest.mark.skipif(mosquitto_path() is None, reason="needs Mosquitto")


def network(hidden: int) -> torch.nn.Module:
    torch.manual_seed(hidden)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, CLASSES)
    )


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["label"])


def logits(model: torch.nn.Module, batch: Batch) -> Batch:
    return {"logits": model(batch["x"])}


def write_ladder(folder: Path, *widths: int) -> tuple[Path, list[Path]]:
    """A ladder, and the meta-network of each rung."""
    batch = {"x": torch.randn(5, FEATURES), "label": torch.tensor([0, 1, 2, 0, 1])}
    sgd, metas = export.Sgd(lr=0.1), [folder / f"meta-{width}" for width in widths]
    export.submodels(
        network, loss, batch, widths=widths, optimizer=sgd, dynamic=DYNAMIC,
        directory=folder / "net", predict=logits, verify=False,
    )  # fmt: skip
    for width, meta in zip(widths, metas, strict=True):
        recipe = Recipe(network(width), loss, batch, DYNAMIC, sgd, logits)
        attention_recipe(recipe).export(meta, verify=False)
    return folder / "net", metas


def labelled(count: int, seed: int) -> LocalData:
    found = samples(count, seed)
    return LocalData({"x": found["x"], "label": found["y"]})


def test_mutual_learners_fetch_each_others_samples_once(tmp_path: Path) -> None:
    task = FleetTask(
        "mutual",
        [write_mutual_artifact(tmp_path / "net")],
        rounds=3,
        settings={"training": {"classes": CLASSES, "sample_form": "float16"}},
        deadline_seconds=NEVER_SECONDS,
    )
    members = [
        FleetMember(f"d{n}", LocalData(samples(40, n, n), samples(10, n + 50, n))) for n in range(3)
    ]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        rows = list(fleet.rounds(patience_seconds=PATIENCE_SECONDS))
        fleet.settle(PATIENCE_SECONDS)
        assert [(row.round, row.participants) for row in rows] == [(1, 3), (2, 3), (3, 3)]
        metrics = rows[-1].metrics
        assert metrics is not None and metrics["owners"] == 3
        assert metrics["public_loss"] < rows[1].metrics["public_loss"]  # type: ignore[index]
        assert sorted(fleet.sent_bytes()) == ["d0", "d1", "d2"]
        assert all(each > 0 for each in fleet.sent_bytes().values())
        assert {name.split(".")[0] for name in fleet.state()} >= {"labels", "public"}
        for device in fleet.devices.values():
            status = device.status()
            assert (status.verdict, status.problem, status.refused) == ("counted", "", {})
            said = device.predict({"x": samples(30, 9)["x"]})["probabilities"]
            assert np.mean(said.argmax(1) == samples(30, 9)["y"]) > 0.8


def test_attention_reaches_clusters_and_weak_devices(tmp_path: Path) -> None:
    ladder, metas = write_ladder(tmp_path, 3, 6)
    task = FleetTask(
        "attention",
        [ladder],
        companions=metas,
        rounds=4,
        settings={"training": {"warm_up_rounds": 1, "base_steps": 5, "aggregator_mixes": False}},
        deadline_seconds=NEVER_SECONDS,
    )
    members = [
        FleetMember("measured", labelled(40, 0), TrainingOptions(capability_seconds=0.5)),
        FleetMember("small", labelled(40, 1), TrainingOptions(artifact="width-3")),
        FleetMember("weak", labelled(40, 2), TrainingOptions(placement="aggregator")),
    ]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        rows = list(fleet.rounds(patience_seconds=PATIENCE_SECONDS))
        fleet.settle(PATIENCE_SECONDS)
        status = {name: device.status() for name, device in fleet.devices.items()}
        assert [row.participants for row in rows] == [3] * 4
        assert {each.verdict for each in status.values()} == {"counted"}
        assert {each.problem for each in status.values()} == {""}
        assert (status["measured"].artifact, status["measured"].k) == ("width-6", 2)
        assert "width-6 takes" in status["measured"].k_reason
        assert (status["small"].artifact, status["small"].k) == ("width-3", 1)
        # Of the others' vectors each fetched those it may mix, the weak device its mixture alone.
        kept = {
            name: len(each._home.attachments.ids(each.status().task))
            for name, each in fleet.devices.items()
        }
        assert kept == {"measured": 2, "small": 2, "weak": 1}
        assert fleet.devices["small"].predict({"x": samples(5, 1)["x"]})["logits"].shape == (5, 3)


def test_a_fleet_that_cannot_start_says_why(tmp_path: Path) -> None:
    task = FleetTask("fedavg", [tmp_path / "nothing"], rounds=1)
    member = FleetMember("anna", labelled(3, 1))
    with (
        pytest.raises(ValueError, match="all different"),
        local_fleet(task, [member, member], tmp_path / "fleet"),
    ):
        pass
    with (
        pytest.raises(FleetError, match="does not exist"),
        local_fleet(task, [member], tmp_path / "fleet"),
    ):
        pass
