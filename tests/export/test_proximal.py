"""FedProx's pull towards the round's first parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.losses import proximal, with_anchor
from export.models.images import ImageShape
from export.models.mutual import example_batch, mutual_recipe


def test_the_pull_is_mu_times_the_way_from_the_anchor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = with_anchor(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return m(b["x"]).pow(2).mean() + proximal(m, b["mu"])

    batch = {"x": torch.randn(5, 3), "mu": torch.tensor(0.3)}
    export.train_step(
        model,
        loss,
        batch,
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}},
        predict=lambda m, b: {"y": m(b["x"])},
        directory=tmp_path / "a",
    )
    trainer = Trainer(tmp_path / "a", providers="cpu")
    first = trainer.parameters
    anchors = {f"anchor.{name}": np.ones_like(value) for name, value in first.items()}
    assert set(trainer.buffers) == set(anchors)
    x = {"x": batch["x"].numpy()}
    predicted = trainer.predict(x)["y"]
    trainer.set_parameters(anchors)
    np.testing.assert_array_equal(trainer.predict(x)["y"], predicted)

    trainer.step({**x, "mu": np.float32(0)})
    free = trainer.parameters
    trainer.set_parameters(first)
    trainer.step({**x, "mu": np.float32(0.5)})
    for name, value in trainer.parameters.items():
        pull = 0.1 * 0.5 * (first[name] - 1)
        np.testing.assert_allclose(value, free[name] - pull, atol=1e-6)
    for name, value in trainer.buffers.items():
        np.testing.assert_array_equal(value, anchors[name])


def test_the_mutual_artifact_takes_an_anchor(tmp_path: Path) -> None:
    shape = ImageShape(size=16)
    recipe = mutual_recipe("vgg", shape, with_proximal=True)
    recipe.export(tmp_path / "a", verify=False)
    trainer = Trainer(tmp_path / "a", providers="cpu")
    batch = {n: v.numpy() for n, v in example_batch(shape).items()}
    plain = trainer.step({**batch, "mu": np.float32(1)})
    trainer.reset()
    zeros = {f"anchor.{n}": np.zeros_like(v) for n, v in trainer.parameters.items()}
    trainer.set_parameters(zeros)
    norm = sum(float(np.sum(v.astype(np.float64) ** 2)) for v in trainer.parameters.values())
    anchored = trainer.step({**batch, "mu": np.float32(1)})
    # Both weigh the local loss by a half.
    np.testing.assert_allclose(anchored - plain, 0.5 * 0.5 * norm, rtol=1e-4)


def test_a_model_without_anchor_or_with_two_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no anchor"):
        proximal(model, torch.tensor(1.0))
    with_anchor(model)
    with pytest.raises(ValueError, match="already has 'anchor'"):
        with_anchor(model)
