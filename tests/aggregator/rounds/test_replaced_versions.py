"""A task's versions around its replacement: which compare, and which can be gone back to."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.rounds.replacement import plan
from aggregator.serve.assembly import World, assemble
from aggregator.store.versions import Versions
from aggregator.task.file import Task, read_task
from device_sdk.artifact import safetensors
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from tests.aggregator.rounds.test_evaluator import (
    DEVICES,
    ROUND,
    Fleet,
    hits,
    ranked,
    update_body,
)
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import command
from tests.fakes.scatter_updates import of_triples
from tests.fakes.tasks import add_task, task_text

WIDER = ("columns = 8", "columns = 12")
PLAIN = ("[evaluation]", '[scatter.optimizer]\nname = "plain"\n[evaluation]')


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command of the operator; what it printed, where it succeeds, else its error."""

    def work(fleet: Fleet, *arguments: str, fails: bool = False) -> str:
        capsys.readouterr()
        assert command(fleet.home, *arguments) == int(fails)
        said = capsys.readouterr()
        return said.err if fails else said.out

    return work


def replace(fleet: Fleet, change: tuple[str, str], *options: str) -> None:
    """Ask for the task to be replaced by what its file says after a change."""
    text = fleet.home.task_file.read_text()
    assert change[0] in text
    file = fleet.home.folder / "next.toml"
    file.write_text(text.replace(*change))
    assert command(fleet.home, "task", "replace", "default", "--from", str(file), *options) == 0


def wider(fleet: Fleet, *options: str) -> None:
    """Another model takes the task over, and devices train it from then on."""
    replace(fleet, WIDER, *options)
    fleet.parts.tasks.look_again()
    fleet.body = update_body(12)


def versions(fleet: Fleet) -> Versions:
    return fleet.parts.first.store.versions


def best(fleet: Fleet, run: Callable[..., str]) -> tuple[int | None, list[int], list[int]]:
    """The best version, as ``evaluations`` and as ``models`` says it, and those that are kept."""
    listed = json.loads(run(fleet, "models", "--task", "default", "--json"))
    found: int | None = json.loads(run(fleet, "evaluations", "--task", "default", "--json"))["best"]
    return found, [each["version"] for each in listed if each["best"]], [
        each["version"] for each in listed
    ]  # fmt: skip


def test_figures_of_a_model_that_was_replaced_are_no_measure(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "[models]\nkeep_last = 2\nkeep_best = 1")
    for share in (0.9, 0.5):
        fleet.play(hits(share))
    assert best(fleet, run) == (0, [0], [2, 1, 0])
    assert "best by hr10" in run(fleet, "models")
    wider(fleet, "--now")
    assert best(fleet, run) == (None, [], [3, 2, 0])  # 0 while no other takes its place
    assert "another model" in run(fleet, "models")
    out = str(tmp_path / "best.safetensors")
    said = run(fleet, "model", "--version", "best", "--out", out, fails=True)
    assert "no kept version of the present model (3 and later) has a figure of 'hr10'" in said
    add_task(fleet.home, "air", task_text(fleet.home, "air"))
    warm = fleet.home.folder / "tasks" / "air.toml"
    warm.write_text(
        warm.read_text().replace("[round]", 'warm_start = "task:default@best"\n[round]')
        + "[evaluation]\n"
    )
    fleet.parts.tasks.look_again()
    assert "(3 and later)" in run(fleet, "task", "list")
    for share in (0.3, 0.4):
        fleet.play(hits(share))
    assert best(fleet, run) == (4, [4], [5, 4])  # nothing keeps version 0 but a pin


def test_another_server_optimizer_leaves_the_model_what_it_is(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "early_stopping = 2\n[models]\nkeep_last = 2\nkeep_best = 1")
    for share in (0.5, 0.9, 0.4, 0.4):
        fleet.play(hits(share))
    assert fleet.parts.first.rounds.rests  # with version 1's model, as version 5
    # A round that nobody takes part in needs no waiting for.
    replace(fleet, PLAIN)
    fleet.parts.tasks.look_again()
    assert fleet.parts.first.store.facts.label == "default scatter"
    assert fleet.parts.first.task.binding.settings.optimizer.name == "plain"
    run(fleet, "models", "--pin", "5")
    # Rounds count anew, although none has improved what is the best of this model.
    for share in (0.3, 0.2):
        fleet.play(hits(share))
        assert not fleet.parts.first.rounds.rests
    assert best(fleet, run)[:2] == (1, [1])
    fleet.play(hits(0.2))
    # Devices end with it, and what is older can be gone back to.
    assert fleet.parts.first.rounds.rests and versions(fleet).all()[0].origin == "version 1"
    run(fleet, "rollback", "--to", "5")
    fleet.tick()
    assert versions(fleet).all()[0].origin == "version 5"


def test_a_task_that_has_had_its_rounds_has_them_anew_when_it_is_replaced(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "", f"{ROUND}\nmost_rounds = 1")
    fleet.play(hits(0.5))
    assert fleet.parts.first.rounds.rests
    wider(fleet)
    fleet.play(hits(0.6))
    assert fleet.parts.first.rounds.rests and fleet.evaluated[0].version == 2


def triples_body() -> bytes:
    return encode_scatter_update(Update(1, of_triples(range(4), range(8))), 8, "float32")


def test_the_task_file_that_was_replaced_comes_back_with_its_version(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "")
    # Of least squares a model of any width fits.
    replace(fleet, ("[scatter]", '[scatter]\nloss = "bpr"'), "--now")
    fleet.parts.tasks.look_again()
    fleet.body = triples_body()
    fleet.play(hits(0.9))
    one = versions(fleet).model(2)["items"]
    first_file = run(fleet, "task", "show", "default", "--version", "0")
    before = run(fleet, "task", "show", "default")
    assert before == fleet.home.task_file.read_text() and 'loss = "bpr"' not in first_file
    wider(fleet, "--now")
    # The fleet's tables are those of now, whatever the file had; its paths are found from anywhere.
    fleet.home.task_file.write_text(fleet.home.task_file.read_text() + "[metrics]\nport = 0\n")
    kept = run(fleet, "task", "show", "default", "--version", "2")
    assert WIDER[0] in kept and 'loss = "bpr"' in kept and "[broker]" not in kept
    assert f'folder = "{fleet.home.folder}"' in kept
    assert "has no version 9" in run(fleet, "task", "show", "default", "--version", "9", fails=True)
    assert "the task file of that time is used" in run(fleet, "rollback", "--to", "2")
    assert "version 2's model becomes the next" in run(fleet, "status")
    assert "does not go back to version 2" in run(fleet, "rollback", "--cancel")
    assert "no rollback waits" in run(fleet, "rollback", "--cancel", fails=True)
    run(fleet, "rollback", "--to", "2")
    assert "waits to be replaced" in run(fleet, "rollback", "--to", "0", fails=True)
    fleet.restart()
    fleet.parts.tasks.look_again()
    assert fleet.parts.first.task.binding.settings.columns == 8
    assert WIDER[0] in fleet.home.task_file.read_text()
    assert "[metrics]" in fleet.home.task_file.read_text()
    number = fleet.parts.first.aggregation.version
    np.testing.assert_array_equal(versions(fleet).model(number)["items"], one)
    # And forth again, to the wider one.
    assert "is used again" in run(fleet, "rollback", "--to", "3")


def test_each_version_is_shown_with_the_file_that_it_was_made_under(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.play(hits(0.9))
    fleet.play(hits(0.9))
    text = fleet.home.task_file.read_text()
    for seconds in (1, 2):  # edited in place: the first of them makes no version
        changed = text.replace("grace_seconds = 0.0", f"grace_seconds = {seconds}.0")
        assert changed != text
        fleet.home.task_file.write_text(changed)
        fleet.parts.tasks.between_rounds(fleet.parts.first)
    fleet.play(hits(0.9))
    shown = [
        re.findall(
            r"grace_seconds = (\d)", run(fleet, "task", "show", "default", "--version", str(each))
        )
        for each in (0, 2, 3)
    ]
    assert shown == [["0"], ["0"], ["2"]]


def test_a_file_of_before_that_can_be_served_no_more_is_named(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "")
    folder = fleet.home.folder
    scatter = fleet.home.task_file.read_text()
    linear_artifact(folder / "linear")
    _, _, tables = scatter.partition("[broker]")
    file = folder / "next.toml"
    file.write_text(
        '[task]\nmethod = "fedavg"\nartifacts = ["linear"]\n[broker]'
        + tables.partition("[scatter")[0]
    )
    run(fleet, "task", "replace", "default", "--from", str(file), "--now")
    fleet.parts.tasks.look_again()
    file.write_text(scatter)
    run(fleet, "task", "replace", "default", "--from", str(file), "--now")
    fleet.parts.tasks.look_again()
    (folder / "linear").rename(folder / "gone")
    said = run(fleet, "rollback", "--to", "1", fails=True)
    assert "linear" in said and "task show default --version 1" in said
    (folder / "gone").rename(folder / "linear")
    run(fleet, "rollback", "--to", "1")
    fleet.parts.tasks.look_again()
    assert fleet.parts.first.task.binding.method_name == "fedavg"


def test_a_version_comes_back_with_the_frozen_values_that_it_was_trained_with_alone(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    """Adapters fit any backbone of the same shapes, and mean something on one."""
    fleet = Fleet(tmp_path, "")
    folder = fleet.home.folder
    _, _, tables = fleet.home.task_file.read_text().partition("[broker]")
    file = folder / "next.toml"
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1))
        export.train_step(
            model,
            lambda model, batch: (model(batch["x"]).square().mean(), {}),
            {"x": torch.rand(2, 3)},
            optimizer=export.Sgd(lr=0.1),
            dynamic={"x": {0: "batch"}},
            directory=folder / name,
        )
        file.write_text(
            f'[task]\nmethod = "fedavg"\nartifacts = ["{name}"]\n[broker]'
            + tables.partition("[scatter")[0]
        )
        run(fleet, "task", "replace", "default", "--from", str(file), "--now")
        fleet.parts.tasks.look_again()
    assert "the task file of that time is used" in run(fleet, "rollback", "--to", "1")
    run(fleet, "rollback", "--cancel")
    shutil.rmtree(folder / "one")
    shutil.copytree(folder / "other", folder / "one")
    said = run(fleet, "rollback", "--to", "1", fails=True)
    assert "trained with the frozen values of the artifact" in said


def test_a_replacement_in_between_is_told_where_it_takes_a_rollback_s_place(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "")
    fleet.play(hits(0.9))
    run(fleet, "rollback", "--to", "0")  # waits for the open round
    wider(fleet, "--now")
    assert versions(fleet).awaited() is None
    told = "version 0's model did not become the next version: the task was replaced"
    assert told in run(fleet, "status") and told in run(fleet, "models")
    (seen,) = json.loads(run(fleet, "status", "--json"))["tasks"]
    assert seen["rollback"]["version"] is None and told in seen["rollback"]["dropped"]
    fleet.restart()
    assert told in run(fleet, "status")
    assert command(fleet.home, "rollback", "--cancel") == 0
    assert told not in run(fleet, "status")
    # A rollback that is done leaves nothing behind.
    run(fleet, "rollback", "--to", "2")
    assert json.loads(run(fleet, "status", "--json"))["tasks"][0]["rollback"]["version"] == 2
    fleet.tick()
    for device in DEVICES:
        fleet.send(device, ranked(np.zeros(3, np.int64)))
    fleet.commit()
    fleet.now += 101
    fleet.tick()
    seen = json.loads(run(fleet, "status", "--json"))["tasks"][0]["rollback"]
    assert seen == {"version": None, "dropped": None}
    assert versions(fleet).all()[0].origin == "version 2"


def test_versions_of_a_method_with_items_and_of_one_without_stay_apart(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    fleet = Fleet(tmp_path, "")
    folder = fleet.home.folder
    scatter = fleet.home.task_file.read_text()
    linear_artifact(folder / "linear")
    (folder / "other.tsv").write_text("".join(f"other-{row}\n" for row in range(30)))
    _, _, tables = scatter.partition("[broker]")
    fedavg = (
        '[task]\nmethod = "fedavg"\nartifacts = ["linear"]\n[broker]'
        + tables.partition("[scatter")[0]
    )

    def replaced(text: str, *, fails: bool = False) -> str:
        file = folder / "next.toml"
        file.write_text(text)
        said = run(fleet, "task", "replace", "default", "--from", str(file), "--now", fails=fails)
        fleet.parts.tasks.look_again()
        return said

    def taken(version: int, form: str, *, fails: bool = False) -> str:
        out = str(tmp_path / f"{version}.{form}")
        return run(fleet, "model", "--version", str(version), "--out", out, fails=fails)

    replaced(fedavg)
    taken(0, "safetensors")
    ids = json.loads(
        safetensors.decode((tmp_path / "0.safetensors").read_bytes()).metadata["items"]
    )
    assert ids[:2] == ["item-0", "item-1"]
    assert "of another method" in taken(0, "onnx", fails=True)
    other = scatter.replace("items.tsv", "other.tsv")
    assert "does not begin with the 20 items" in replaced(other, fails=True)
    assert fleet.parts.first.task.binding.method_name == "fedavg"
    replaced(scatter)
    assert "of another method" in taken(1, "onnx", fails=True)
    taken(1, "safetensors")
    taken(0, "onnx")
    taken(2, "onnx")
    fleet.play(hits(0.5))


@pytest.mark.parametrize(
    ("method", "artifact", "more", "same"),
    [
        ("fedavg", "mae", '[fedavg.optimizer]\nname = "adam"', True),
        ("fedavg", "mae", "[evaluation]\nleast_devices = 5", True),
        ("fedavg", "rmse", "", False),  # of the same shapes, with a metric of its own
        ("fedavg", "mae", '[fedavg.training]\npersonal = "linear.bias"', False),
        ("attention", "mae", "", False),
    ],
)
def test_the_same_model_is_one_of_the_same_method_artifact_and_arrays(
    tmp_path: Path, method: str, artifact: str, more: str, same: bool
) -> None:
    for name in ("mae", "rmse"):
        linear_artifact(tmp_path / name, name)
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom)

    def task(method: str, artifact: str, more: str = "") -> Task:
        home.task_file.write_text(
            f'[task]\nmethod = "{method}"\nartifact = "../{artifact}"\n{more}\n'
        )
        return read_task(home.task_file)

    world = World(time.monotonic, time.time, np.random.default_rng(1))
    old = task("fedavg", "mae")
    parts = assemble(home, home.open_store(), old, world)
    planned = plan(parts.store.first, (old.name, old.cohort), task(method, artifact, more), None)
    assert planned.same_model is same
    parts.store.database.close()
