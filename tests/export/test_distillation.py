"""The joint loss of attentive federated distillation, against its sums written out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import export
from device_sdk import Trainer
from export.losses import PENALTY, distillation, example_teachers

CLASSES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("distillation") / "a"
    g = torch.Generator().manual_seed(0)
    export.train_step(
        nn.Linear(4, CLASSES),
        distillation(lambda model, batch: model(batch["x"])),
        {
            "x": torch.randn(9, 4, generator=g),
            "label": torch.arange(9) % CLASSES,
            **example_teachers(CLASSES),
        },
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        predict=lambda m, b: {"probabilities": torch.softmax(m(b["x"]), -1)},
        gradient=PENALTY,
        directory=directory,
    )
    return directory


def _batch(**changes: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    teachers = {name: value.numpy() for name, value in example_teachers(CLASSES).items()}
    # A row with a zero: the clip is what keeps its logarithm finite.
    teachers["teacher"][0] = [1.0, 0.0, 0.0]
    # A row below a distribution, as by the paper's equation 6.
    teachers["teacher"][1] *= 0.75
    return {
        "x": rng.standard_normal((7, 4)).astype(np.float32),
        "label": np.array([0, 1, 2, 0, 1, 0, 0]),
        **teachers,
        **{name: np.float32(value) for name, value in changes.items()},
    }


def _expected(
    weight: np.ndarray, bias: np.ndarray, batch: dict[str, np.ndarray]
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, sums and counts, sample by sample in Python floats."""
    # float32 scalars would make float32 products, too coarse for differences.
    ce, towards, divergence, l2 = (
        float(batch[name]) for name in ("weight_ce", "weight_teacher", "weight_kl", "l2")
    )
    sums, counts, total = np.zeros((CLASSES, CLASSES)), np.zeros(CLASSES), 0.0
    for x, label in zip(batch["x"], batch["label"], strict=True):
        z = np.exp(weight.astype(float) @ x + bias)
        p = z / z.sum()
        sums[label] += p
        counts[label] += 1
        total += ce * -math.log(p[label])
        if batch["has_teacher"][label]:
            t = np.maximum(batch["teacher"][label].astype(float), 1e-4)
            total += towards * -sum(t * np.log(p))
            total += divergence * sum(p * np.log(p / t))
    norm = (weight.astype(float) ** 2).sum() + (bias.astype(float) ** 2).sum()
    return total / len(batch["x"]) + l2 / 2 * norm, sums, counts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_kl": 0.0, "l2": 0.0},
        {"weight_ce": 0.0, "weight_teacher": 0.0, "weight_kl": 1.0},
        {"l2": 3.0},
    ],
)
def test_loss_sums_and_counts(folder: Path, changes: dict[str, float]) -> None:
    trainer = Trainer(folder, providers="cpu")
    batch = _batch(**changes)
    start = trainer.parameters
    loss, sums, counts = _expected(start["weight"], start["bias"], batch)
    np.testing.assert_allclose(trainer.step(batch), loss, rtol=1e-5)
    outputs = trainer.outputs
    np.testing.assert_allclose(outputs["label_sums"], sums, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(outputs["label_counts"], counts)
    # The gradient, by central differences of the oracle.
    for name in ("weight", "bias"):
        moved = (start[name] - trainer.parameters[name]) / 0.1
        slope = np.zeros_like(start[name], dtype=float)
        for index in np.ndindex(slope.shape):
            ends = []
            for shift in (1e-4, -1e-4):
                values = {key: value.astype(float) for key, value in start.items()}
                values[name][index] += shift
                ends.append(_expected(values["weight"], values["bias"], batch)[0])
            slope[index] = (ends[0] - ends[1]) / 2e-4
        np.testing.assert_allclose(moved, slope, rtol=2e-3, atol=2e-5)


def test_the_first_round_is_cross_entropy_whatever_the_table_holds(folder: Path) -> None:
    trainer = Trainer(folder, providers="cpu")
    batch = _batch(weight_ce=1.0, l2=0.0)
    batch["has_teacher"] = np.zeros(CLASSES, np.float32)
    loss = trainer.step(batch)
    moved = trainer.parameters
    np.testing.assert_allclose(trainer.outputs["student_loss"], loss, rtol=1e-6)
    trainer.reset()
    batch["teacher"] = np.zeros((CLASSES, CLASSES), np.float32)
    assert trainer.step(batch) == loss
    for name, value in trainer.parameters.items():
        np.testing.assert_array_equal(value, moved[name])
