from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import export
from aggregator.errors import TaskError
from aggregator.methods.method import read_binding
from aggregator.tables import TomlTable
from device_sdk.artifact import load_artifact
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.wire.arrays.exchange import Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from export.models.click import ClickDesign, click_recipe
from export.models.fields import SampleFields
from tests.fakes.handmade import linear_artifact

FIELDS = SampleFields(categorical=(("user", 5), ("movie", 7)))
RNG = np.random.default_rng(0)


def table(**values: object) -> TomlTable:
    return TomlTable({"training": values}, "teacher_logits")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "wide_deep"
    recipe = click_recipe(ClickDesign("wide_deep", FIELDS))
    recipe.export(folder, optimizer=export.Sgd(), verify=False)
    return folder


def test_a_task_file_makes_the_method_for_any_fitting_models(clicks: Path) -> None:
    binding = read_binding("teacher_logits", table(classes=2, beta=0.25, precision="int8"))
    assert binding.method_name == "teacher_logits" and not binding.needs_catalogue
    artifact = load_artifact(clicks)
    method = binding.build(0, RNG, [artifact, artifact])
    broadcast = method.open_round(1)
    training = TeacherLogitsTraining.from_scalars(broadcast.settings)
    assert (training.beta, training.precision) == (0.25, "int8")

    means = np.array([[0.75, 0.25], [0.5, 0.5]], dtype=np.float32)
    knowledge = LabelKnowledge(np.arange(2), np.array([3, 4]), means)
    body = encode_update(Update(1, encode_knowledge(knowledge, training)), Codec.INT8, RNG)
    update = binding.decode(body, 1, 0, "0" * 32)
    method.check(update)
    method.absorb(update)
    assert method.close_round().participants == 1


def test_models_of_another_loss_or_task_are_refused(clicks: Path, tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    two = read_binding("teacher_logits", table(classes=2))
    with pytest.raises(ValueError, match="gives no label_counts"):
        two.build(0, RNG, [load_artifact(tmp_path / "linear")])
    three = read_binding("teacher_logits", table(classes=3))
    with pytest.raises(ValueError, match=r"knows \(2,\) classes, the task 3"):
        three.build(0, RNG, [load_artifact(clicks)])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "classes"),
        ({"classes": 2, "gamma": 0.1}, "gamma"),
        ({"classes": 2, "alpha": 2}, "alpha"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(values: dict[str, object], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        read_binding("teacher_logits", table(**values))
