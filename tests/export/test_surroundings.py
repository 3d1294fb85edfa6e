"""The same model gives the same bytes, whatever surrounds the export."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import export


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)
    )


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["index"]), batch["label"])


def _export(model: nn.Module, directory: Path, surroundings: AbstractContextManager[Any]) -> str:
    with surroundings:
        return export.train_step(
            model,
            _loss,
            {"index": torch.arange(24).reshape(8, 3) % 10, "label": torch.arange(8) % 6},
            optimizer=export.Adam(0.01),
            dynamic={"index": {0: "batch"}, "label": {0: "batch"}},
            directory=directory,
            verify=False,
            name="model",
        ).id


def test_same_bytes_without_gradients_in_inference_mode_and_in_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _model()
    made = [
        _export(model, tmp_path / "plain", nullcontext()),
        _export(model, tmp_path / "no_grad", torch.no_grad()),
        _export(model, tmp_path / "inference", torch.inference_mode()),
    ]

    def run(number: int) -> None:
        made.append(_export(model, tmp_path / str(number), nullcontext()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 5
    assert len(set(made)) == 1
