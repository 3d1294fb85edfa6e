"""A mutual-learning artifact small enough for tests, and samples that it can learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from device_sdk.local_data import LocalData
from export import ConflictProjection, Sgd, train_step
from export.models.mutual import DYNAMIC, mutual_losses

CLASSES, FEATURES, KNOWN_IDS = 3, 4, 10


def predicted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"probabilities": torch.softmax(model(batch["x"]), -1)}


def write_mutual_artifact(folder: Path) -> Path:
    """A linear softmax with plain SGD, lr 0.1."""
    g = torch.Generator().manual_seed(0)
    return _write(
        folder,
        torch.nn.Linear(FEATURES, CLASSES),
        torch.randn(5, FEATURES, generator=g),
        torch.randn(4, FEATURES, generator=g),
    )


def write_mutual_ids_artifact(folder: Path) -> Path:
    """A softmax over the sum of two ids' embeddings, ids 0 to ``KNOWN_IDS`` - 1."""
    g = torch.Generator().manual_seed(0)
    return _write(
        folder,
        _Ids(),
        torch.randint(KNOWN_IDS, (5, 2), generator=g),
        torch.randint(KNOWN_IDS, (4, 2), generator=g),
    )


class _Ids(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(KNOWN_IDS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum(1)


def _write(folder: Path, model: torch.nn.Module, x: torch.Tensor, x_pub: torch.Tensor) -> Path:
    g = torch.Generator().manual_seed(1)
    batch = {
        "x": x,
        "y": torch.randint(CLASSES, (5,), generator=g),
        "x_pub": x_pub,
        "y_pub": torch.randint(CLASSES, (4,), generator=g),
        "teacher": torch.softmax(torch.randn(4, CLASSES, generator=g), -1),
        "confidence": torch.rand(4, generator=g),
        **{
            name: torch.tensor(1.0)
            for name in ("weight_local", "weight_public", "project", "weight_kl", "weight_ce")
        },
    }
    train_step(
        model,
        mutual_losses,
        batch,
        optimizer=Sgd(lr=0.1),
        dynamic=DYNAMIC,
        predict=predicted,
        gradient=ConflictProjection(),
        directory=folder,
        verify=False,
    )
    return folder


def samples(count: int, seed: int, turn: float = 0.0) -> dict[str, np.ndarray]:
    """Three blobs around corners, moved by ``turn``."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    x = rng.standard_normal((count, FEATURES)).astype(np.float32) * 0.3
    x[np.arange(count), y] += 2
    x[:, 3] += turn
    return {"x": x, "y": y.astype(np.int64)}


def local_data(seed: int, train: int = 30, public: int = 8) -> LocalData:
    return LocalData(samples(train, seed, seed % 3), samples(public, seed + 100, seed % 3))


def local_ids(seed: int, train: int = 30, public: int = 8) -> LocalData:
    """Pairs of ids whose first one names the class."""
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> dict[str, np.ndarray]:
        x = rng.integers(0, KNOWN_IDS, (count, 2))
        return {"x": x, "y": x[:, 0] % CLASSES}

    return LocalData(drawn(train), drawn(public))
