"""Click-through rate: deepctr-torch's models as its ``fit`` trains them, and public code's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("CTR")

ROWS = 32
VOCABULARY = 100
FIELDS = 6
HISTORY = 5


def _as_fit_does(model: nn.Module, batch: Batch) -> Tensor:
    """One matrix of floats with ids among them, the sum of the losses and the model's own L2."""
    clicked = model(batch["x"]).squeeze(-1)
    loss = F.binary_cross_entropy(clicked, batch["y"], reduction="sum")
    total: Tensor = loss + model.get_regularization_loss() + model.aux_loss  # type: ignore[operator]
    return total.sum()


def _import_quietly() -> None:
    """The package asks PyPI for a newer version of itself as soon as it is imported."""
    asking = types.ModuleType("deepctr_torch.utils")
    asking.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules.setdefault("deepctr_torch.utils", asking)


def _columns(dense: int = 3) -> tuple[list[Any], Tensor]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"C{i}", VOCABULARY, 8) for i in range(FIELDS)]
    columns += [DenseFeat(f"I{i}", 1) for i in range(dense)]
    ids = torch.randint(VOCABULARY, (ROWS, FIELDS)).float()
    return columns, torch.cat([ids, torch.rand(ROWS, dense)], 1)


def _deepctr(
    name: str, linear: bool = True, dense: int = 3, **given: Any
) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        _import_quietly()
        import deepctr_torch.models as models

        columns, x = _columns(dense)
        of = (columns, columns) if linear else (columns,)
        torch.manual_seed(1)
        model = getattr(models, name)(*of, **given)
        return TrainStep(model, _as_fit_does, {"x": x, "y": torch.randint(2, (ROWS,)).float()})

    return write


_HIDDEN: dict[str, Any] = {"dnn_hidden_units": (64, 32)}
for _title, _name, _given in (
    ("Wide & Deep", "WDL", {**_HIDDEN, "dnn_dropout": 0.5}),
    ("DeepFM", "DeepFM", _HIDDEN),
    ("DCN", "DCN", _HIDDEN),
    ("DCN-Mix", "DCNMix", _HIDDEN),
    ("xDeepFM", "xDeepFM", {**_HIDDEN, "cin_layer_size": (32, 16)}),
    ("AutoInt", "AutoInt", _HIDDEN),
    ("NFM", "NFM", {**_HIDDEN, "bi_dropout": 0.2}),
    ("AFM", "AFM", {"afm_dropout": 0.1, "dense": 0}),
    ("FiBiNET", "FiBiNET", _HIDDEN),
    ("IFM", "IFM", _HIDDEN),
    ("DIFM", "DIFM", _HIDDEN),
    ("AFN", "AFN", {"ltl_hidden_size": 32, "afn_dnn_hidden_units": (64, 32)}),
    ("ONN", "ONN", _HIDDEN),
):
    KIND.add(f"{_title} (deepctr)", "deepctr_torch")(_deepctr(_name, **_given))
KIND.add("PNN (deepctr)", "deepctr_torch")(
    _deepctr("PNN", linear=False, use_outter=True, **_HIDDEN)
)


def _interest(name: str, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        _import_quietly()
        import deepctr_torch.models as models
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

        columns = [
            SparseFeat("user", VOCABULARY, 8),
            SparseFeat("item", VOCABULARY, 8),
            DenseFeat("pay", 1),
            VarLenSparseFeat(
                SparseFeat("hist_item", VOCABULARY, 8, embedding_name="item"), HISTORY,
                length_name="length",
            ),
        ]  # fmt: skip
        lengths = torch.randint(1, HISTORY + 1, (ROWS,))
        kept = torch.arange(HISTORY) < lengths.unsqueeze(1)
        history = torch.randint(1, VOCABULARY, (ROWS, HISTORY)) * kept
        x = torch.cat(
            [
                torch.randint(1, VOCABULARY, (ROWS, 2)).float(),
                torch.rand(ROWS, 1),
                history.float(),
                lengths.float().unsqueeze(1),
            ],
            1,
        )
        torch.manual_seed(1)
        model = getattr(models, name)(columns, ["item"], **given)
        return TrainStep(model, _as_fit_does, {"x": x, "y": torch.randint(2, (ROWS,)).float()})

    return write


KIND.add("DIN (deepctr)", "deepctr_torch")(
    _interest("DIN", att_weight_normalization=True, **_HIDDEN)
)
KIND.add("DIEN (deepctr)", "deepctr_torch")(_interest("DIEN", gru_type="AUGRU", **_HIDDEN))


def _tasks(name: str) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        _import_quietly()
        import deepctr_torch.models as models

        columns, x = _columns()
        torch.manual_seed(1)
        model = getattr(models, name)(
            columns, task_types=["binary", "binary"], task_names=["ctr", "ctcvr"]
        )

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            p = model(batch["x"])
            tasks = [
                F.binary_cross_entropy(p[:, i], batch["y"][:, i], reduction="sum") for i in range(2)
            ]
            return (sum(tasks) + model.get_regularization_loss()).sum()  # type: ignore

        return TrainStep(model, loss, {"x": x, "y": torch.randint(2, (ROWS, 2)).float()})

    return write


KIND.add("MMoE (deepctr)", "deepctr_torch")(_tasks("MMOE"))
KIND.add("PLE (deepctr)", "deepctr_torch")(_tasks("PLE"))
KIND.add("ESMM (deepctr)", "deepctr_torch")(_tasks("ESMM"))


# Public code's idiom: one table for all fields, with offsets.


class FeaturesEmbedding(nn.Module):
    def __init__(self, field_dims: list[int], dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(field_dims), dim)
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)
        nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return self.embedding(x)


def mlp(widths: list[int], dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers.append(nn.Linear(before, after))
        if norm:
            layers.append(nn.BatchNorm1d(after))
        layers += [nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


class DeepFM(nn.Module):
    def __init__(self, field_dims: list[int], dim: int) -> None:
        super().__init__()
        self.linear = FeaturesEmbedding(field_dims, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.embedding = FeaturesEmbedding(field_dims, dim)
        self.mlp = mlp([len(field_dims) * dim, 64, 32], 0.2, norm=True)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        square_of_sum = torch.sum(e, dim=1) ** 2
        sum_of_square = torch.sum(e**2, dim=1)
        fm = 0.5 * (square_of_sum - sum_of_square).sum(1, keepdim=True)
        first = torch.sum(self.linear(x), dim=1) + self.bias
        return torch.sigmoid((first + fm + self.mlp(e.view(e.size(0), -1))).squeeze(1))


class FieldAware(nn.Module):
    """FFM: a table a field, pairs in a Python loop."""

    def __init__(self, field_dims: list[int], dim: int) -> None:
        super().__init__()
        self.fields = len(field_dims)
        self.embeddings = nn.ModuleList(
            nn.Embedding(sum(field_dims), dim) for _ in range(self.fields)
        )
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        xs = [embedding(x) for embedding in self.embeddings]
        ix = []
        for i in range(self.fields - 1):
            for j in range(i + 1, self.fields):
                ix.append(xs[j][:, i] * xs[i][:, j])
        return torch.sigmoid(torch.stack(ix, dim=1).sum((1, 2)))


class CrossV2(nn.Module):
    """DCN-V2 with low rank."""

    def __init__(self, field_dims: list[int], dim: int, layers: int, rank: int) -> None:
        super().__init__()
        width = len(field_dims) * dim
        self.embedding = FeaturesEmbedding(field_dims, dim)
        self.u = nn.ParameterList(
            nn.Parameter(torch.randn(width, rank) * 0.1) for _ in range(layers)
        )
        self.v = nn.ParameterList(
            nn.Parameter(torch.randn(rank, width) * 0.1) for _ in range(layers)
        )
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))
        self.mlp = mlp([width, 64], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x0 = self.embedding(x).flatten(1)
        xl = x0
        for u, v, b in zip(self.u, self.v, self.b):
            xl = x0 * (xl @ u @ v + b) + xl
        return torch.sigmoid(self.mlp(xl).squeeze(-1))


class AutoInt(nn.Module):
    def __init__(self, field_dims: list[int], dim: int) -> None:
        super().__init__()
        self.embedding = FeaturesEmbedding(field_dims, dim)
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, 2, dropout=0.1) for _ in range(2))
        self.residual = nn.Linear(dim, dim)
        self.out = nn.Linear(len(field_dims) * dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        cross = e.transpose(0, 1)
        for layer in self.attention:
            cross, _ = layer(cross, cross, cross)
        cross = F.relu(cross.transpose(0, 1) + self.residual(e)).contiguous()
        return torch.sigmoid(self.out(cross.view(-1, cross.size(1) * cross.size(2))).squeeze(1))


def _fields(model: Callable[[list[int], int], nn.Module]) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return nn.BCELoss()(model(batch["fields"]), batch["click"].float())

        batch = {
            "fields": torch.randint(VOCABULARY, (ROWS, FIELDS)),
            "click": torch.randint(2, (ROWS,)),
        }
        return TrainStep(model([VOCABULARY] * FIELDS, 16), loss, batch)

    return write


KIND.add("DeepFM")(_fields(DeepFM))
KIND.add("FFM")(_fields(FieldAware))
KIND.add("DCN-V2")(_fields(lambda dims, k: CrossV2(dims, k, 3, 8)))
KIND.add("AutoInt")(_fields(AutoInt))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.ReLU())
        self.item = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.ReLU())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u = F.normalize(self.user(user), dim=-1)
        return u @ F.normalize(self.item(item), dim=-1).t()


@KIND.add("two towers, in-batch negatives")
def two_towers() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["user"], batch["item"]) / 0.05
        return F.cross_entropy(scores, torch.arange(scores.size(0), device=scores.device))

    batch = {n: torch.randint(VOCABULARY, (ROWS,)) for n in ("user", "item")}
    return TrainStep(TwoTower(), loss, batch)


class MaskNet(nn.Module):
    """Wang et al. 2021, serial mask blocks."""

    def __init__(self, dims: list[int], dim: int) -> None:
        super().__init__()
        width = len(dims) * dim
        self.embedding = FeaturesEmbedding(dims, dim)
        self.norm = nn.LayerNorm(dim)
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, w)) for w in (width, 32)
        )
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(w, 32), nn.LayerNorm(32), nn.ReLU()) for w in (width, 32)
        )
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        out = self.norm(e).reshape(e.shape[0], -1)
        flat = e.reshape(e.shape[0], -1)
        for mask, hidden in zip(self.masks, self.hidden):
            out = hidden(mask(flat) * out)
        return torch.sigmoid(self.out(out)).squeeze(-1)


KIND.add("MaskNet")(_fields(MaskNet))
