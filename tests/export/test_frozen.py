"""State that a step leaves as it is: frozen parameters, constant buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import device_sdk.trainer
import export
from device_sdk import Trainer
from device_sdk.errors import NonFiniteStep

Parity = Callable[..., export.Exported]
BATCH = {"x": torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


class HeadOnly(nn.Module):
    """A frozen backbone in evaluation mode, a head, a constant mask, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.backbone.requires_grad_(False)
        norm = self.backbone[1]
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
        norm.running_mean.normal_()
        self.head = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 2.0]))

    def train(self, mode: bool = True) -> HeadOnly:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.head(self.backbone(x).mean((2, 3))) * self.mask)
        return found


@pytest.fixture
def artifact(assert_parity: Parity) -> Path:
    return assert_parity(HeadOnly(), BATCH).directory


def _arrays() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in BATCH.items()}


def test_what_a_step_keeps_is_no_output(artifact: Path) -> None:
    trainer = Trainer(artifact)
    manifest = trainer.artifact
    of = {member.name: tensor for tensor, member in manifest.members()}
    frozen = {name for name, tensor in of.items() if tensor.frozen}
    assert frozen == {name for name in of if name.startswith("backbone.")}
    assert of["mask"].name in manifest.kept and not of["mask"].frozen
    assert of["norm.running_mean"].name not in manifest.kept
    train = onnx.load(artifact / "train.onnx").graph
    assert {p.of for p in manifest.graphs["train"].new_state} & manifest.kept == set()
    assert sum(node.op_type in ("Conv", "ConvTranspose") for node in train.node) == 1
    before = trainer.buffers
    trainer.step(_arrays())
    after = trainer.buffers
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_another_backbone_is_what_trains_and_predicts_from_then_on(artifact: Path) -> None:
    model = HeadOnly()
    trainer = Trainer(artifact)
    trainer.predict(_arrays())
    trainer.step(_arrays())
    trainer.reset()
    with torch.no_grad():
        for tensor in (*model.backbone.parameters(), *model.backbone.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.5)
    other = {f"backbone.{n}": t.numpy() for n, t in model.backbone.state_dict().items()}
    trainer.set_parameters(other)
    model.eval()
    expected = model(BATCH["x"]).detach().numpy()
    np.testing.assert_allclose(trainer.predict(_arrays())["output"], expected, atol=1e-5)
    model.train()
    expected = model(BATCH["x"]).detach().numpy()
    trainer.step(_arrays())
    np.testing.assert_allclose(trainer.outputs["output"], expected, atol=1e-4)
    for name, value in other.items():
        np.testing.assert_array_equal(trainer.buffers[name], value)


def test_the_same_backbone_again_opens_no_session(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(artifact)
    trainer.step(_arrays())
    monkeypatch.delattr(device_sdk.trainer, "make_session")
    trainer.set_parameters({**trainer.parameters, **trainer.buffers})
    trainer.step(_arrays())


def test_a_checkpoint_holds_a_replaced_backbone(artifact: Path, tmp_path: Path) -> None:
    one = Trainer(artifact)
    one.set_parameters({"backbone.0.weight": one.buffers["backbone.0.weight"] * 2})
    one.step(_arrays())
    one.save(tmp_path / "checkpoint")
    two = Trainer(artifact)
    two.restore(tmp_path / "checkpoint")
    for _ in range(3):
        assert one.step(_arrays()) == two.step(_arrays())
    assert all(np.array_equal(one.state[name], array) for name, array in two.state.items())


def test_a_bad_step_changes_nothing(artifact: Path) -> None:
    trainer = Trainer(artifact)
    before = trainer.state
    with pytest.raises(NonFiniteStep):
        trainer.step({"x": np.full((6, 3, 8, 8), np.nan, np.float32)})
    assert all(np.array_equal(trainer.state[name], array) for name, array in before.items())


def test_a_frozen_parameter_beside_trained_ones(assert_parity: Parity) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 4), requires_grad=False)
            self.a = nn.Parameter(torch.randn(2, 4))
            self.b = nn.Parameter(torch.randn(5, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight + self.b @ self.a).T

    exported = assert_parity(Adapted(), {"x": torch.randn(6, 4)})
    assert exported.manifest.kept == {"frozen"}
