"""Rungs of fewer blocks, and rungs that train the last ones of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import export
from aggregator.methods.attention import AttentionBinding, AttentionSettings
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.load import rung_folders
from export import ExportError

ROWS, WIDTH = 4, 12


class Residual(nn.Module):
    """x + f(x), with the norm before f or, as ``nn.TransformerEncoderLayer``, behind the sum."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), first
        self.f = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.f(self.norm(x)) if self.first else self.norm(x + self.f(x))
        return found


class Stack(nn.Module):
    """So many blocks between a stem and a head."""

    def __init__(self, blocks: int, first: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Residual(first) for _ in range(blocks))
        self.bn = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.bn(x))
        return found


class Divided(Stack):
    """What the blocks make is divided by their number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(self.blocks)


def last(count: int) -> nn.Module:
    """All four blocks, of which the last ``count`` are trained, and the head."""
    made = Stack(4)
    made.stem.requires_grad_(count == 4)
    for block in made.blocks[: 4 - count]:
        block.requires_grad_(False)
    return made


def frozen(count: int) -> nn.Module:
    return Stack(count).requires_grad_(count > 1)


def headless(count: int) -> nn.Module:
    made = Stack(count)
    made.head.requires_grad_(count < 4)
    return made


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def example() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.rand(ROWS, 5, generator=g),
        "label": torch.randint(3, (ROWS,), generator=g),
    }


def written(make: Any, folder: Path, **chosen: Any) -> list[export.Exported]:
    torch.manual_seed(5)
    given: dict[str, Any] = {
        "widths": (1, 4),
        "optimizer": export.Sgd(lr=0.1),
        "dynamic": {name: {0: "batch"} for name in example()},
        "verify": False,
    }
    return export.submodels(make, loss, example(), directory=folder, **{**given, **chosen})


@pytest.mark.parametrize("first", [True, False])
def test_a_rung_of_fewer_blocks_is_the_full_model_without_the_others(
    tmp_path: Path, first: bool
) -> None:
    small, full = written(lambda blocks: Stack(blocks, first), tmp_path / "net", verify=first)
    own, whole = small.manifest.moved, full.manifest.moved
    assert own.items() < whole.items()
    assert {name for name in whole if name not in own} == {
        name for name in whole if name.startswith(("blocks.1.", "blocks.2.", "blocks.3."))
    }
    for folder in rung_folders(tmp_path / "net"):
        trainer = Trainer(folder, providers="cpu")
        batch = {name: each.numpy() for name, each in example().items()}
        before = trainer.step(batch)
        for _ in range(5):
            after = trainer.step(batch)
        assert after < before


def test_a_rung_that_trains_the_last_blocks_is_brought_the_others(tmp_path: Path) -> None:
    small, full = written(last, tmp_path / "net", verify=True)
    told = small.manifest
    assert told.submodel is not None and full.manifest.submodel is not None
    assert full.manifest.submodel.held == () and not full.manifest.frozen_members
    assert set(told.moved) | set(told.submodel.held) == set(full.manifest.moved)
    assert {name.rpartition(".")[0] for name in told.submodel.held} == {
        "stem", *(f"blocks.{n}.{each}" for n in range(3) for each in ("norm", "f.0", "f.2")),
    }  # fmt: skip
    assert not told.frozen and told.given == full.manifest.given
    # On a device they are stand-ins until a task brings them, and no step moves them.
    rung, whole = (
        load_artifact(tmp_path / "net" / name).initial for name in ("width-1", "width-4")
    )
    for name in whole:
        np.testing.assert_array_equal(rung[name], whole[name])
    trainer = Trainer(tmp_path / "net/width-1", providers="cpu")
    batch = {name: each.numpy() for name, each in example().items()}
    trainer.step(batch)
    brought = {"stem.weight": np.full((WIDTH, 5), 0.5, np.float32)}
    trainer.set_parameters(brought)
    trainer.step(batch)
    after = {**trainer.parameters, **trainer.buffers}
    np.testing.assert_array_equal(after["stem.weight"], brought["stem.weight"])
    assert (after["blocks.3.f.0.weight"] != whole["blocks.3.f.0.weight"]).any()
    assert (after["bn.running_mean"] != whole["bn.running_mean"]).any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Divided, r"rest switched off, which is blocks\.1, blocks\.2, blocks\.3"),
        (frozen, r"make\(1\) trains nothing"),
        (headless, r"make\(1\) trains 'head.bias', which make\(4\), the full model, keeps frozen"),
        (lambda count: Stack(5 - count), r"make\(1\) has 'blocks.1.f.0.bias'"),
    ],
)
def test_what_is_no_rung_is_refused_by_name(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        written(make, tmp_path / "net")
    assert not [*tmp_path.iterdir()]


def test_a_block_that_is_to_stay_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'blocks\.1\..*to stay whole"):
        written(Stack, tmp_path / "net", whole=("blocks.1",))


def test_attention_takes_no_rung_that_trains_less_than_all(tmp_path: Path) -> None:
    def plain(count: int) -> nn.Module:
        made = last(count)
        made.bn = nn.Identity()
        return made

    written(plain, tmp_path / "net")
    artifacts = [load_artifact(each) for each in rung_folders(tmp_path / "net")]
    binding = AttentionBinding("attention", AttentionSettings())
    with pytest.raises(ValueError, match=r"width-1 does not train 'blocks\.0\.f\.0\.bias'"):
        binding.build(0, np.random.default_rng(0), artifacts)
