"""Each layer that must export, alone behind a linear layer, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import export


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _dense(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _after_linear(layer: nn.Module, features: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(6, features), layer)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "relu6": nn.ReLU6,
    "mish": nn.Mish,
    "softsign": nn.Softsign,
    "log_sigmoid": nn.LogSigmoid,
    "dropout": lambda: nn.Dropout(0.3),
    "glu": nn.GLU,
    "layer_norm": lambda: nn.LayerNorm(12),
    "layer_norm_plain": lambda: nn.LayerNorm(12, elementwise_affine=False),
    "layer_norm_no_bias": lambda: nn.LayerNorm(12, bias=False),
    "batch_norm": lambda: nn.BatchNorm1d(12),
    "batch_norm_plain": lambda: nn.BatchNorm1d(12, affine=False),
    "batch_norm_no_stats": lambda: nn.BatchNorm1d(12, track_running_stats=False),
    "group_norm": lambda: nn.GroupNorm(3, 12),
    "rms_norm": lambda: nn.RMSNorm(12),
    "linear_no_bias": lambda: nn.Linear(12, 5, bias=False),
    "bilinear_form": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Linear(4, 2)),
}


def test_layers_behind_linear_ones(assert_parity_of_each: Any) -> None:
    models = {
        name: _seeded(lambda make=make: _after_linear(make()))  # type: ignore[misc]
        for name, make in ACTIVATIONS.items()
    }
    assert_parity_of_each(models, {"x": _dense(8, 6)})


@pytest.mark.parametrize(
    "optimizer",
    [export.Sgd(0.1, momentum=0.9, weight_decay=0.01), export.Adam(0.01, weight_decay=0.1)],
)
def test_optimizers(optimizer: export.Optimizer, assert_parity: Any) -> None:
    model = _seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    assert_parity(model, {"x": _dense(8, 6)}, optimizer=optimizer)


def test_layer_norm_of_data_far_from_zero(assert_parity: Any) -> None:
    model = _seeded(lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 2)))
    assert_parity(model, {"x": _dense(8, 16) + 100})


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding_with_duplicates(padding_idx: int | None, assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, padding_idx=padding_idx)
            self.out = nn.Linear(12, 3)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(index).flatten(1))

    index = torch.tensor([[1, 1, 3], [3, 0, 1], [9, 9, 9], [0, 3, 2], [5, 5, 1]])
    exported = assert_parity(_seeded(Model), {"index": index})
    assert exported.manifest.sequential


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "weighted", "padding"),
    [("sum", True, None), ("sum", False, 9), ("mean", False, None), ("max", False, None),
     ("max", False, 9)],
)  # fmt: skip
def test_embedding_bag(mode: str, weighted: bool, padding: int | None, assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding)
            self.out = nn.Linear(4, 3)

        def forward(self, index: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            return self.out(self.table(index, per_sample_weights=weight))

    batch = {"index": torch.tensor([[1, 1, 3], [3, 0, 1], [9, 9, 9], [0, 3, 2], [5, 5, 1]])}
    if weighted:
        batch["weight"] = _dense(5, 3)
    assert_parity(_seeded(Model), batch)


class _Attention(nn.Module):
    def __init__(self, need_weights: bool, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self._need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x, need_weights=self._need_weights)[0]
        return result


def test_multihead_attention(assert_parity_of_each: Any) -> None:
    torch.manual_seed(0)
    models = {
        "plain": _Attention(False, 0.0),
        "with_weights": _Attention(True, 0.0),
        "with_dropout": _Attention(False, 0.2),
        "with_both": _Attention(True, 0.2),
    }
    assert_parity_of_each(models, {"x": _dense(4, 5, 8)})


def test_attention_with_mask(assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            result: torch.Tensor = self.attention(
                x, x, x, attn_mask=later, key_padding_mask=hidden, need_weights=False
            )[0]
            return result

    hidden = torch.zeros(4, 5, dtype=torch.bool)
    hidden[1, 4] = hidden[3, 3:] = True
    assert_parity(_seeded(Model), {"x": _dense(4, 5, 8), "hidden": hidden})


def test_transformer_layers(assert_parity_of_each: Any) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dropout": 0.1, "batch_first": True}
    models = {
        "norm_last": nn.TransformerEncoderLayer(8, 2, 16, **settings),
        "norm_first": nn.TransformerEncoderLayer(8, 2, 16, **settings, norm_first=True),
    }
    assert_parity_of_each(models, {"x": _dense(4, 5, 8)}, optimizer=export.Adam(1e-2))


def test_linear_on_three_dimensions_keeps_both_axes_free(assert_parity: Any) -> None:
    model = _seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    exported = assert_parity(
        model,
        {"x": _dense(4, 5, 6)},
        dynamic={"x": {0: "batch", 1: "time"}},
        loss=lambda m, b: (m(b["x"]) ** 2).mean(),
    )
    port = exported.manifest.graphs["train"].select("batch")[0]
    assert port.shape == ("batch", "time", 6)


LOSSES: dict[str, Any] = {
    "cross_entropy": lambda o, b: nn.functional.cross_entropy(o, b["label"]),
    "cross_entropy_weighted": lambda o, b: nn.functional.cross_entropy(
        o, b["label"], weight=torch.tensor([1.0, 2.0, 0.5, 1.5]).to(o.dtype)
    ),
    "cross_entropy_smoothed": lambda o, b: nn.functional.cross_entropy(
        o, b["label"], label_smoothing=0.1
    ),
    "cross_entropy_ignoring": lambda o, b: nn.functional.cross_entropy(
        o, b["label"], ignore_index=2
    ),
    "cross_entropy_sum": lambda o, b: nn.functional.cross_entropy(o, b["label"], reduction="sum"),
    "cross_entropy_soft": lambda o, b: nn.functional.cross_entropy(o, b["soft"]),
    "imported_nll": lambda o, b: torch.nn.NLLLoss()(torch.log_softmax(o, -1), b["label"]),
    "ours_hard": lambda o, b: export.losses.cross_entropy(o, b["label"]),
    "ours_soft": lambda o, b: export.losses.cross_entropy(o, b["soft"]),
    "ours_kl": lambda o, b: export.losses.kl_divergence(o, b["soft"]),
    "ours_bpr": lambda o, b: export.losses.bpr(o[:, 0], o[:, 1]),
    "ours_mse": lambda o, b: export.losses.mean_squared_error(o, b["soft"]),
    "ours_bce": lambda o, b: export.losses.binary_cross_entropy(o, b["soft"]),
    "ours_weighted": lambda o, b: export.losses.cross_entropy(
        o, b["label"], weight=b["soft"][:, 0]
    ),
    "bce_with_logits": lambda o, b: nn.functional.binary_cross_entropy_with_logits(o, b["soft"]),
    "bce": lambda o, b: nn.functional.binary_cross_entropy(torch.sigmoid(o), b["soft"]),
    "mse": lambda o, b: nn.functional.mse_loss(o, b["soft"]),
    "l1": lambda o, b: nn.functional.l1_loss(o, b["soft"]),
    "smooth_l1": lambda o, b: nn.functional.smooth_l1_loss(o, b["soft"]),
    "huber": lambda o, b: nn.functional.huber_loss(o, b["soft"]),
    "kl_div": lambda o, b: nn.functional.kl_div(
        torch.log_softmax(o, -1), b["soft"], reduction="batchmean"
    ),
    "norms": lambda o, b: torch.linalg.vector_norm(o, dim=1).mean() + o.std() + o.var(0).sum(),
    "gather": lambda o, b: -o.gather(1, b["label"].unsqueeze(1)).mean(),
    "indexing": lambda o, b: (o[:, [0, 2]] * o[:, 1:3]).mean() + o[b["label"]].pow(2).mean(),
    "strided": lambda o, b: (o[:, ::2] * o[:, 1::2]).mean() + o[..., -1].exp().mean(),
    "cumulative": lambda o, b: o.cumsum(1).sin().mean() + o.logsumexp(1).mean(),
    "extremes": lambda o, b: o.max(1).values.mean() - o.amin(1).mean() + o.topk(2).values.mean(),
    "joins": lambda o, b: (
        torch.stack([o, o.flip(1)], 1).mean(1).tanh() @ o.T
    ).pow(2).mean() + torch.cat([o, o * 2], 1).clamp(-1, 1).mean(),
    "einsum": lambda o, b: torch.einsum("bi,bj->bij", o, o).sigmoid().mean(),
    "where": lambda o, b: torch.where(o > 0, o * o, -0.5 * o).mean(),
    "powers": lambda o, b: (o.abs() + 1).pow(1.7).mean() + (o * o + 1).rsqrt().mean(),
    "logs": lambda o, b: (
        (o * o).log1p().mean() + torch.expm1(o * 0.1).mean() + o.abs().log().mean()
    ),
    "padding": lambda o, b: nn.functional.pad(o, (1, 2), value=0.5).pow(3).mean(),
    "cosine": lambda o, b: nn.functional.cosine_similarity(o, b["soft"]).mean(),
    "normalize": lambda o, b: (nn.functional.normalize(o) * b["soft"]).sum(),
}  # fmt: skip


def test_losses(assert_parity_of_each: Any) -> None:
    """Each of a model of its own."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": _dense(9, 6),
        "label": torch.randint(4, (9,), generator=generator),
        "soft": torch.softmax(torch.randn(9, 4, generator=generator), -1),
    }
    losses = {name: lambda m, b, loss=loss: loss(m(b["x"]), b) for name, loss in LOSSES.items()}
    assert_parity_of_each({name: _seeded(make) for name in LOSSES}, batch, losses)


def test_mean_of_cross_entropy_is_not_scaled_by_the_batch(assert_parity: Any) -> None:
    """The usual converter multiplies these gradients by the batch size; see the two batch sizes."""
    model = _seeded(lambda: nn.Linear(6, 4))
    batch = {"x": _dense(16, 6), "label": torch.arange(16) % 4}
    exported = assert_parity(
        model,
        batch,
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["label"]),
    )
    sizes = {c.sizes["batch"] for c in exported.report.comparisons}
    assert len(sizes) == 2


def test_shared_and_frozen_parameters(assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.fixed = nn.Linear(6, 2)
            self.fixed.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fixed(torch.tanh(self.second(torch.tanh(self.first(x)))))

    exported = assert_parity(_seeded(Model), {"x": _dense(5, 6)})
    kinds = {m.name: t.kind for t, m in exported.manifest.members()}
    assert kinds["fixed.weight"] == "buffer" and "second.weight" not in kinds
