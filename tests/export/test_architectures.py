"""Random small architectures against torch: whatever exports must be right."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import export

_MIDDLE = {
    "linear": lambda width, p: nn.Linear(width, width, bias=p > 0.2),
    "relu": lambda width, p: nn.ReLU(),
    "gelu": lambda width, p: nn.GELU(),
    "silu": lambda width, p: nn.SiLU(),
    "tanh": lambda width, p: nn.Tanh(),
    "batch_norm": lambda width, p: nn.BatchNorm1d(width, momentum=0.05 + p / 2),
    "layer_norm": lambda width, p: nn.LayerNorm(width),
    "group_norm": lambda width, p: nn.GroupNorm(2, width),
    "dropout": lambda width, p: nn.Dropout(p),
    "softmax": lambda width, p: nn.Softmax(-1),
    "residual": lambda width, p: _Residual(width),
}


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class _Network(nn.Module):
    def __init__(
        self, rows: int, width: int, layers: list[tuple[str, float]], classes: int
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.first = nn.Linear(3, width)
        self.middle = nn.Sequential(*[_MIDDLE[name](width, p) for name, p in layers])
        self.last = nn.Linear(width, classes)

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mixed = self.table(index).mean(1) + self.first(x)
        result: torch.Tensor = self.last(self.middle(mixed))
        return result


# Shrinking would take minutes: what is drawn is small already.
@settings(
    max_examples=3,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@example(
    seed=0,
    rows=2,
    width=2,
    classes=2,
    layers=[("batch_norm", 0.0)] * 3,
    loss="cross_entropy",
    adam=False,
    batch=4,
)
@example(
    seed=603,
    rows=2,
    width=6,
    classes=5,
    layers=[
        ("relu", 0.548609262983785),
        ("residual", 0.3),
        ("dropout", 0.7915554749159798),
        ("group_norm", 0.570999850940057),
        ("tanh", 0.6938259479716538),
        ("softmax", 0.15525743593765504),
    ],
    loss="mse",
    adam=True,
    batch=5,
)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(2, 9),
    width=st.sampled_from([2, 4, 6]),
    classes=st.integers(2, 5),
    layers=st.lists(st.tuples(st.sampled_from(sorted(_MIDDLE)), st.floats(0, 0.8)), max_size=6),
    loss=st.sampled_from(["cross_entropy", "mse", "bce", "soft"]),
    adam=st.booleans(),
    batch=st.integers(4, 9),
)
def test_random_architecture(
    seed: int,
    rows: int,
    width: int,
    classes: int,
    layers: list[tuple[str, float]],
    loss: str,
    adam: bool,
    batch: int,
) -> None:
    torch.manual_seed(seed)
    model = _Network(rows, width, layers, classes)

    def compute(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["index"], batch["x"])
        soft = torch.softmax(batch["y"], -1)
        if loss == "cross_entropy":
            return nn.functional.cross_entropy(logits, batch["label"])
        if loss == "mse":
            return nn.functional.mse_loss(logits, batch["y"])
        if loss == "bce":
            return nn.functional.binary_cross_entropy_with_logits(logits, soft)
        return export.losses.cross_entropy(logits, soft)

    examples = {
        "index": torch.randint(rows, (batch, 3)),
        "x": torch.randn(batch, 3),
        "y": torch.randn(batch, classes),
        "label": torch.randint(classes, (batch,)),
    }
    with tempfile.TemporaryDirectory() as folder:
        exported = export.train_step(
            model,
            compute,
            examples,
            optimizer=export.Adam(0.01) if adam else export.Sgd(0.05, momentum=0.9),
            dynamic={name: {0: "batch"} for name in examples},
            directory=Path(folder) / "artifact",
        )
    assert exported.report is not None and exported.report.worst.excess <= 1
