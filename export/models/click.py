"""Click models by name: fields, embeddings, optional attention encoding, network."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from export.build import Exported, export_train_step
from export.distillation import PENALTY, distillation, example_teachers, joint_loss
from export.models.click_cnn import ClickCnn
from export.models.deepfm import DeepFm
from export.models.din import Din
from export.models.field_attention import FieldAttention
from export.models.fields import FieldEmbedding, Fields, example_fields
from export.models.wide_deep import WideDeep
from export.optimizers import Adam, Optimizer
from export.proximal import proximal, with_anchor

Network = Literal["cnn", "wide_deep", "din", "deepfm"]
CLICK_MODELS: tuple[str, ...] = get_args(Network)
CHANNELS = 32
"""The paper's m."""

MOVIELENS = Fields(
    categorical=(
        ("user", 2000),
        ("movie", 3300),
        ("gender", 2),
        ("age", 7),
        ("occupation", 21),
    ),
    multi_valued=(("genres", 18),),
    numeric=("year",),
    history="movie",
)
"""MovieLens 1M's fields, at the paper's numbers of users and movies."""


class ClickModel(nn.Module):
    """A batch (see ``Fields``) to two logits [b, 2]: no click, click.

    With ``attention`` the network sees the re-weighted fields and their sum as one field more.
    """

    def __init__(
        self, network: str, fields: Fields, *, dim: int = 8, attention: bool = False
    ) -> None:
        super().__init__()
        if network not in CLICK_MODELS:
            raise ValueError(
                f"there is no click model {network!r}; expected {', '.join(CLICK_MODELS)}"
            )
        if network == "din" and fields.history is None:
            raise ValueError("din reads a history: set Fields(history=<a categorical field>)")
        self.kind = network
        first_order = network in ("wide_deep", "deepfm")
        self.embedding = FieldEmbedding(fields, dim, extra=1 if first_order else 0)
        self.attention = FieldAttention(len(fields.names), dim, CHANNELS) if attention else None
        count = len(fields.names) + (1 if attention else 0)
        self.network: nn.Module
        if network == "cnn":
            self.network = ClickCnn(count, dim)
        elif network == "wide_deep":
            self.network = WideDeep(count, dim)
        elif network == "din":
            self.network = Din(count, dim)
        else:
            self.network = DeepFm(count, dim)
        self._item = 0
        if fields.history is not None:
            self._item = fields.names.index(fields.history)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._forward(batch)[0]

    def explained(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits; with attention ``field_weights`` [b, r] and ``field_interactions`` [r, r]."""
        logits, embedded, weights = self._forward(batch)
        if self.attention is None or weights is None:
            return logits, {}
        interactions = self.attention.interactions(embedded)
        return logits, {"field_weights": weights, "field_interactions": interactions}

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        dim = self.embedding.dim
        if self.kind == "din":
            embedded, history, mask = self.embedding.with_history(batch)
        else:
            embedded = self.embedding(batch)
        plain = embedded[:, :, :dim]
        encoded, weights = plain, None
        if self.attention is not None:
            encoded, total, weights = self.attention(plain)
            encoded = torch.cat([encoded, total.unsqueeze(1)], 1)
        if self.kind == "din":
            logits = self.network(encoded, plain[:, self._item], history, mask)
        elif self.kind == "cnn":
            logits = self.network(encoded)
        else:
            logits = self.network(encoded, embedded[:, :, dim])
        return logits, plain, weights


def click_model(
    network: str,
    *,
    fields: Fields = MOVIELENS,
    dim: int = 8,
    attention: bool = False,
    seed: int = 0,
) -> ClickModel:
    """A click model; ``seed`` draws the initial weights and leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ClickModel(network, fields, dim=dim, attention=attention)


def predicted_clicks(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``logits`` [b, 2], ``click`` [b] (its probability), and the attention's weights if any."""
    if not isinstance(model, ClickModel):
        raise TypeError(f"predicted_clicks takes a ClickModel, not a {type(model).__name__}")
    logits, weights = model.explained(batch)
    return {"logits": logits, "click": torch.softmax(logits, -1)[:, 1], **weights}


def example_clicks(
    network: str, *, fields: Fields = MOVIELENS, batch: int = 16, history: int = 6, seed: int = 0
) -> dict[str, Tensor]:
    """All batch entries of a network's artifact; ``history`` is there for din only."""
    length = history if network == "din" else 0
    g = torch.Generator().manual_seed(seed)
    return {
        **example_fields(fields, batch=batch, history=length, seed=seed),
        "label": torch.randint(2, (batch,), generator=g),
        **example_teachers(2, seed=seed),
    }


def export_click(
    directory: str | Path,
    network: str,
    *,
    fields: Fields = MOVIELENS,
    dim: int = 8,
    attention: bool = False,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    with_proximal: bool = False,
    verify: bool = True,
) -> Exported:
    """Write a click model's artifact with the distillation loss (``export.distillation``).

    Plain cross-entropy is ``has_teacher`` = 0, ``weight_ce`` = 1, ``l2`` = 0. ``with_proximal``
    adds anchors and the batch scalar ``mu`` (``export.proximal``). Axes: ``batch``, and ``past``
    for din's history. Adam with 1e-3 by default, as in the paper.
    """
    model: nn.Module = click_model(network, fields=fields, dim=dim, attention=attention, seed=seed)
    batch = example_clicks(network, fields=fields)
    loss = distillation(lambda module, entries: module(entries))
    if with_proximal:
        model = with_anchor(model)
        batch["mu"] = torch.tensor(0.1)
        loss = _pulled
    per_sample = ("categories", *dict(fields.multi_valued), "numbers", "label", "history")
    dynamic = {name: {0: "batch"} for name in per_sample if name in batch}
    if "history" in batch:
        dynamic["history"] = {0: "batch", 1: "past"}
    return export_train_step(
        model,
        loss,
        batch,
        optimizer=optimizer or Adam(lr=1e-3),
        dynamic=dynamic,
        predict=predicted_clicks,
        gradient=PENALTY,
        directory=directory,
        verify=verify,
        name=f"{network}_attention" if attention else network,
    )


def _pulled(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, outputs = joint_loss(model(batch), batch)
    return loss + proximal(model, batch["mu"]), outputs
