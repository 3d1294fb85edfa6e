"""Sums at repeated indices: with one thread where that is fastest, else the same at any number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer

ROWS, WIDTH = 40, 64


class _Words(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.places = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.wide = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, 1))

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.wide(self.table(words) + self.places[words])
        return result


def _exported(inner: int, folder: Path) -> export.Exported:
    torch.manual_seed(0)
    return export.train_step(
        _Words(inner),
        lambda m, b: m(b["words"]).square().mean(),
        {"words": torch.randint(ROWS, (16, 4))},
        optimizer=export.Sgd(lr=0.1),
        dynamic={"words": {0: "batch"}},
        directory=folder,
    )


def test_a_step_of_small_products_runs_with_one_thread(tmp_path: Path) -> None:
    assert _exported(8, tmp_path / "small").manifest.sequential


def test_a_step_of_large_products_is_the_same_at_any_number_of_threads(tmp_path: Path) -> None:
    assert not _exported(8192, tmp_path / "large").manifest.sequential
    # Rows times width are far above where onnxruntime's ScatterND adds in several threads.
    words = np.random.default_rng(0).integers(ROWS, size=(2048, 4))
    moved = []
    for threads in (1, 2, 4):
        trainer = Trainer(tmp_path / "large", providers="cpu", threads=threads)
        trainer.step({"words": words})
        moved.append({name: trainer.parameters[name].copy() for name in ("table.weight", "places")})
    for other in moved[1:]:
        for name, values in moved[0].items():
            np.testing.assert_array_equal(other[name], values)
