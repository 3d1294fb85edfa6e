"""The train steps that are timed: each an ordinary torch model, loss, batch and optimizer.

Only torch is imported here, so that a peer's environment can load the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """One row of the table. ``target`` is the least speed against torch eager (1 = as fast)."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[], Batch]
    optimizer: str
    target: float | None
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    peer: bool = True
    """Whether onnxruntime-training can express it."""


class Factors(nn.Module):
    """User and item vectors, as torch users write them."""

    def __init__(self, items: int, k: int) -> None:
        super().__init__()
        self.users = nn.Embedding(1, k)
        self.items = nn.Embedding(items, k)

    def forward(self, user: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        u, p, n = self.users(user), self.items(positive), self.items(negative)
        margin = (u * (p - n)).sum(-1)
        penalty = (u * u).sum() + (p * p).sum() + (n * n).sum()
        return functional.softplus(-margin).sum() + 0.005 * penalty


class ClickModel(nn.Module):
    """Eight categorical fields, self-attention over them, and an MLP."""

    def __init__(self, fields: int = 8, rows: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, fields: Tensor) -> Tensor:
        e = self.table(fields)
        mixed = self.norm(e + self.attention(e, e, e, need_weights=False)[0])
        result: Tensor = self.mlp(mixed.flatten(1)).squeeze(-1)
        return result


class Recurrent(nn.Module):
    """Two recurrent layers (of 128 units, over 48 steps) and a classifier on the last."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], units: int = 128) -> None:
        super().__init__()
        self.rnn = kind(12, units, num_layers=2, batch_first=True)
        self.out = nn.Linear(units, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.rnn(x)[0][:, -1])
        return result


def batch_norm_mlp() -> nn.Module:
    """Three linear layers with batch norm."""
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def _clicked(model: nn.Module, batch: Batch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch["fields"]), batch["click"])


def _ranked(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(batch["user"], batch["positive"], batch["negative"])
    return result


def _classification(classes: int, *shape: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(*shape), "y": torch.randint(classes, shape[:1])}


def _triples(items: int, triples: int) -> Callable[[], Batch]:
    return lambda: {
        "user": torch.zeros(triples, dtype=torch.int64),
        "positive": torch.randint(items, (triples,)),
        "negative": torch.randint(items, (triples,)),
    }


def _clicks() -> Batch:
    return {"fields": torch.randint(1000, (32, 8)), "click": torch.rand(32).round()}


_ROWS = {"x": {0: "batch"}, "y": {0: "batch"}}


def _factors(name: str, items: int, triples: int, k: int, target: float | None) -> Workload:
    dynamic = {entry: {0: "triples"} for entry in ("user", "positive", "negative")}
    return Workload(
        name, lambda: Factors(items, k), _ranked, _triples(items, triples), "sgd", target, dynamic,
        peer=False,
    )  # fmt: skip


def workloads() -> list[Workload]:
    """Every row, smallest first."""
    from benchmarks.device.resnet import ResNet
    from export.models.images import LeNet

    def recurrent(kind: Any) -> Callable[[], nn.Module]:
        return lambda: Recurrent(kind)

    fields = {"fields": {0: "batch"}, "click": {0: "batch"}}
    return [
        _factors("BPR, 200 rows, 100 triples, k = 16", 200, 100, 16, 3.0),
        _factors("BPR, 200 rows, 100 triples, k = 64", 200, 100, 64, 3.0),
        _factors("BPR, 3,706 rows, 100 triples, k = 16", 3706, 100, 16, None),
        _factors("BPR, 3,706 rows, 100 triples, k = 64", 3706, 100, 64, None),
        Workload("CTR, batch 32", ClickModel, _clicked, _clicks, "adam", 3.0, fields),
        Workload(
            "BatchNorm MLP, batch 32", batch_norm_mlp, _classified, _classification(10, 32, 20),
            "adam", 3.0, _ROWS,
        ),
        Workload(
            "GRU 2 x 128 x 48, batch 32", recurrent(nn.GRU), _classified,
            _classification(5, 32, 48, 12), "adam", 1.0, _ROWS,
        ),
        Workload(
            "LSTM 2 x 128 x 48, batch 32", recurrent(nn.LSTM), _classified,
            _classification(5, 32, 48, 12), "adam", 0.7, _ROWS,
        ),
        Workload(
            "LeNet, batch 32", LeNet, _classified, _classification(10, 32, 1, 28, 28),
            "adam", 0.85, _ROWS,
        ),
        Workload(
            "ResNet-18, 3 x 64 x 64, batch 8", ResNet, _classified,
            _classification(10, 8, 3, 64, 64), "sgd", 0.6, _ROWS,
        ),
    ]  # fmt: skip


def small_workloads() -> list[Workload]:
    """Every kind of row, as small as a test can wait for on a software driver."""
    from benchmarks.device.resnet import ResNet

    def smaller(workload: Workload) -> Workload:
        kind = workload.name.split()[0]
        if kind in ("GRU", "LSTM"):
            cell = nn.GRU if kind == "GRU" else nn.LSTM
            batch = _classification(5, 4, 5, 12)
            return replace(workload, model=lambda: Recurrent(cell, 8), batch=batch)
        if kind.startswith("ResNet"):
            batch = _classification(10, 4, 3, 16, 16)
            return replace(workload, model=lambda: ResNet(10, 8, stages=2), batch=batch)
        if kind.startswith("LeNet"):
            return replace(workload, batch=_classification(10, 4, 1, 28, 28))
        return workload

    # Factors among all the other state, and as a tensor of their own.
    packed, _, _, large, *rows = [smaller(workload) for workload in workloads()]
    return [packed, large, *rows]


def large_workloads() -> list[Workload]:
    """What an accelerator is for."""
    from benchmarks.device.large import LoraClassifier, ResNet50, VisionTransformer

    def sentences() -> Batch:
        return {"x": torch.randint(8000, (8, 64)), "y": torch.randint(5, (8,))}

    pictures = _classification(10, 8, 3, 64, 64)
    return [
        Workload("LoRA, 4 x 256, 64 tokens", LoraClassifier, _classified, sentences, "adam", None,
                 _ROWS),
        Workload("ViT-Tiny, 64 x 64", VisionTransformer, _classified, pictures, "adam", None,
                 _ROWS),
        Workload("ResNet-50, 64 x 64", ResNet50, _classified, pictures, "sgd", None, _ROWS),
    ]  # fmt: skip


def drawn_batch(workload: Workload, rows: int) -> Batch:
    """A batch of so many rows, from as many of the workload's own as it takes."""
    parts: list[Batch] = []
    while sum(len(next(iter(part.values()))) for part in parts) < rows:
        parts.append(workload.batch())
    return {name: torch.cat([part[name] for part in parts])[:rows] for name in parts[0]}


def torch_step(workload: Workload, model: nn.Module, batch: Batch) -> Callable[[], float]:
    """The same step in torch eager."""
    optimizer: torch.optim.Optimizer
    if workload.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    elif "BPR" in workload.name:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step
