"""Adapters on a frozen model, and their ranks as a ladder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import export
from device_sdk import Trainer
from device_sdk.artifact import INITIAL_FILE, ArtifactError, load_artifact, read_manifest
from device_sdk.artifact.load import rung_folders
from export import ExportError

ROWS = 4


class Backbone(nn.Module):
    """Words, two residual blocks and a head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x.mean(1))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["ids"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def example() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(40, (ROWS, 5), generator=g),
        "label": torch.randint(3, (ROWS,), generator=g),
    }


def written(make: Any, folder: Path, **chosen: Any) -> list[export.Exported]:
    given: dict[str, Any] = {
        "widths": (1, 4),
        "optimizer": export.Sgd(lr=0.1),
        "dynamic": {name: {0: "batch"} for name in example()},
        "verify": False,
    }
    return export.submodels(make, loss, example(), directory=folder, **{**given, **chosen})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(3)
    return Backbone()


@pytest.fixture(scope="module")
def made() -> dict[int, nn.Module]:
    """The models that the ladder was made of, by rank."""
    return {}


@pytest.fixture(scope="module")
def ladder(
    backbone: Backbone, made: dict[int, nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    def make(rank: int) -> nn.Module:
        made[rank] = export.lora(backbone, rank, trained=("head",))
        return made[rank]

    folder = tmp_path_factory.mktemp("ladders") / "net"
    written(make, folder, verify=True)
    return folder


def test_an_adapted_model_begins_as_the_given_one_which_stays_as_it_is(backbone: Backbone) -> None:
    ids = example()["ids"]
    before = {name: each.clone() for name, each in backbone.named_parameters()}
    made = export.lora(backbone, 4, trained=("head",), scale=2.0)
    torch.testing.assert_close(made(ids), backbone(ids))
    moved = {name for name, each in made.named_parameters() if each.requires_grad}
    assert moved == {"head.weight", "head.bias"} | {
        f"blocks.{block}.{place}.{role}"
        for block in (0, 1) for place in (1, 3) for role in ("down", "up")
    }  # fmt: skip
    assert made.words.weight.data_ptr() == backbone.words.weight.data_ptr()
    layer = made.blocks[0][1]
    with torch.no_grad():
        layer.up.uniform_()
        x = torch.rand(5, 24)
        adapted = x @ (layer.weight + 2.0 * layer.up @ layer.down).T + layer.bias
    torch.testing.assert_close(layer(x), adapted)
    assert all(each.requires_grad for each in backbone.parameters())
    for name, each in backbone.named_parameters():
        torch.testing.assert_close(each, before[name])


def test_the_ranks_of_adapters_are_slices_and_begin_equal(ladder: Path) -> None:
    full = load_artifact(ladder / "width-4").initial
    assert not full["blocks.0.1.up"].any()
    batch = {name: each.numpy() for name, each in example().items()}
    logits = []
    for folder, rank in zip(rung_folders(ladder), (1, 4), strict=True):
        own = load_artifact(folder).initial
        np.testing.assert_array_equal(own["blocks.0.1.down"], full["blocks.0.1.down"][:rank])
        assert own["blocks.0.1.up"].shape == (32, rank)
        trainer = Trainer(folder, providers="cpu")
        logits.append(trainer.predict(batch)["logits"])
        before = trainer.step(batch)
        for _ in range(5):
            after = trainer.step(batch)
        assert after < before
        kept = {**trainer.parameters, **trainer.buffers}["blocks.0.1.weight"]
        np.testing.assert_array_equal(kept, full["blocks.0.1.weight"])
    for each in logits[:-1]:
        np.testing.assert_allclose(each, logits[-1], atol=1e-6)


def test_what_is_frozen_lies_in_one_file_which_all_rungs_share(ladder: Path) -> None:
    rungs = rung_folders(ladder)
    manifests = [read_manifest(each) for each in rungs]
    (name,) = {each.shared_file for each in manifests}
    assert (ladder / name).stat().st_size > 4 * 24 * 1000
    for folder, manifest in zip(rungs, manifests, strict=True):
        assert (folder / INITIAL_FILE).stat().st_size < 100
        assert {"words.weight", "blocks.0.1.bias"} <= manifest.frozen_members
    shared: dict[str, bytes] = {}
    words = [load_artifact(each, shared).initial["words.weight"] for each in rungs]
    assert np.shares_memory(*words) and len(shared) == 1


@pytest.mark.parametrize("harm", ["changed", "missing"])
def test_other_values_than_the_rung_s_are_refused(ladder: Path, tmp_path: Path, harm: str) -> None:
    shutil.copytree(ladder / "width-1", tmp_path / "width-1")
    name = read_manifest(ladder / "width-1").shared_file
    if harm == "changed":
        (tmp_path / name).write_bytes((ladder / name).read_bytes()[:-4] + bytes(4))
    with pytest.raises(ArtifactError, match=r"was changed|does not exist"):
        load_artifact(tmp_path / "width-1")


def test_a_scale_that_depends_on_the_rank_is_refused(backbone: Backbone, tmp_path: Path) -> None:
    """Which a B of zeros alone would not show."""
    with pytest.raises(ExportError, match=r"blocks\.0\.1.*alpha / r"):
        written(lambda rank: export.lora(backbone, rank, scale=8 / rank), tmp_path / "net")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"layers": ("block",)}, "layers names 'block'"),
        ({"trained": ("haed",)}, "trained names 'haed'"),
        ({"layers": ("words",)}, "no linear layer"),
    ],
)
def test_what_makes_no_adapter_is_refused(
    backbone: Backbone, chosen: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExportError, match=said):
        export.lora(backbone, **{"rank": 2, **chosen})


def test_the_author_s_models_are_as_they_were_after_the_export(
    ladder: Path, backbone: Backbone, made: dict[int, nn.Module]
) -> None:
    full = load_artifact(ladder / "width-4").initial
    for rank, model in made.items():
        for name, each in model.named_parameters():
            wanted = full[name]
            if name.endswith(".down"):
                wanted = wanted[:rank]
            elif name.endswith(".up"):
                wanted = wanted[:, :rank]
            np.testing.assert_array_equal(each.detach().numpy(), wanted, err_msg=name)
    head = dict(backbone.named_parameters())["head.weight"].detach().numpy()
    np.testing.assert_array_equal(head, full["head.weight"])
