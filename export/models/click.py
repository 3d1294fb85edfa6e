"""Click models by name: fields, embeddings, optional attention encoding, network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.build import Recipe
from export.losses import (
    PENALTY,
    distillation,
    example_prototypes,
    example_teachers,
    joint_loss,
    prototype_alignment,
    proximal,
    with_anchor,
)
from export.models.fields import FieldAttention, FieldEmbedding, SampleFields, example_fields

# One score as the two logits that soft labels are made of.


def two_logits(score: Tensor) -> Tensor:
    """Scores [b] to logits [b, 2] whose softmax is (1 - sigmoid(score), sigmoid(score))."""
    return torch.stack([torch.zeros_like(score), score], 1)


def _through(layers: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer is given, which is the embedding of a sample, and what it makes of it."""
    embedding = layers[:-1](x)
    return embedding, layers[-1](embedding)


# Click prediction by convolutions over the fields.


class ClickCnn(nn.Module):
    """Embedded fields [b, r, dim] to an embedding [b, width] and two logits [b, 2].

    The network of AFD's experiments (papers/afd, section 3.1): two convolutions along the fields,
    a maximum over neighbouring fields, and linear layers of 120, ``width`` and 2.
    """

    def __init__(self, count: int, dim: int, *, kernels: int = 32, width: int = 60) -> None:
        super().__init__()
        if count < 2 or kernels < 1:
            raise ValueError(f"{count} fields and {kernels} kernels; expected at least 2 and 1")
        self.first = _Convolution(dim, kernels)
        self.second = _Convolution(kernels, kernels)
        self.head = nn.Sequential(
            nn.Linear(kernels * (count // 2), 120),
            nn.ReLU(),
            nn.Linear(120, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )

    def forward(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        maps = torch.relu(self.second(torch.relu(self.first(fields))))
        even = maps.shape[1] // 2 * 2
        pooled = torch.maximum(maps[:, 0:even:2], maps[:, 1:even:2])
        return _through(self.head, pooled.flatten(1))


class _Convolution(nn.Module):
    """A convolution of width 3 along the fields, [b, r, inputs] to [b, r, outputs].

    Equal to nn.Conv1d(inputs, outputs, 3, padding=1) on the transposed map. As one matrix product
    over neighbours side by side it takes a third of the time, forwards and backwards.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 1, 1))
        sides = torch.cat([padded[:, :-2], x, padded[:, 2:]], -1)
        maps: Tensor = self.linear(sides)
        return maps


# DeepFM: a factorisation machine and a network on the same embeddings.


class DeepFm(nn.Module):
    """Embedded fields [b, r, dim] and first-order weights [b, r] to an embedding [b, width] and two
    logits [b, 2].

    Guo et al. 2017, DeepFM, equations 1 to 4: first-order weights, the inner products of all pairs
    of fields (half of the sum's square less the sum of squares), and a network of 64 and ``width``.
    """

    def __init__(self, count: int, dim: int, *, width: int = 32) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(count * dim, 64),
            nn.ReLU(),
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, fields: Tensor, first_order: Tensor) -> tuple[Tensor, Tensor]:
        total = fields.sum(1)
        pairs = 0.5 * ((total * total).sum(1) - (fields * fields).sum((1, 2)))
        embedding, deep = _through(self.deep, fields.flatten(1))
        return embedding, two_logits(first_order.sum(1) + pairs + deep.squeeze(1))


# Deep interest network: what of the past matters for this item.


class Din(nn.Module):
    """Embedded fields [b, r, dim], the item and the user's past items to an embedding [b, width]
    and two logits [b, 2].

    Zhou et al. 2018, Deep interest network for click-through rate prediction, section 4.3: an
    activation unit weighs each past item h by a small network on (h, h - t, h * t, t), t the item
    in question; the weighted sum, not normalised, joins the fields. Hidden units 32 and layers of
    80, ``width`` and 2 as in AFD's experiments (papers/afd, section 3.1).
    """

    def __init__(self, count: int, dim: int, *, width: int = 40) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.Linear(4 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.head = nn.Sequential(
            nn.Linear((count + 1) * dim, 80),
            nn.ReLU(),
            nn.Linear(80, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )

    def forward(
        self, fields: Tensor, item: Tensor, history: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """item [b, dim]; history [b, length, dim]; mask [b, length], 0 where there is no item."""
        target = item.unsqueeze(1).expand(history.shape)
        pairs = torch.cat([history, history - target, history * target, target], -1)
        weight = self.activation(pairs).squeeze(-1) * mask
        interest = (weight.unsqueeze(1) @ history).squeeze(1)
        return _through(self.head, torch.cat([fields.flatten(1), interest], 1))


# Wide & Deep: remembered values beside generalising ones.


class WideDeep(nn.Module):
    """Embedded fields [b, r, dim] and first-order weights [b, r] to an embedding [b, width] and two
    logits [b, 2].

    Cheng et al. 2016, Wide & Deep learning for recommender systems, equation 3: the sum of a linear
    model on the raw values and a network on their embeddings (128, ``width``, 2 as in AFD's
    experiments, papers/afd, section 3.1). The wide part has no hand-made cross products.
    """

    def __init__(self, count: int, dim: int, *, width: int = 64) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(count * dim, 128),
            nn.ReLU(),
            nn.Linear(128, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )

    def forward(self, fields: Tensor, first_order: Tensor) -> tuple[Tensor, Tensor]:
        embedding, deep = _through(self.deep, fields.flatten(1))
        return embedding, deep + two_logits(first_order.sum(1))


Network = Literal["cnn", "wide_deep", "din", "deepfm"]
CLICK_MODELS: tuple[str, ...] = get_args(Network)
CHANNELS = 32
"""The paper's m."""

MOVIELENS = SampleFields(
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


_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn": ClickCnn,
    "wide_deep": WideDeep,
    "din": Din,
    "deepfm": DeepFm,
}


@dataclass(frozen=True)
class ClickDesign:
    """Which click model: ``network`` of ``CLICK_MODELS`` on these fields, embedded in ``dim``.

    With ``attention`` the network sees the re-weighted fields and their sum as one field more.
    ``width`` is that of the last hidden layer, the embedding of a sample; None for the network's
    own, and a model that is taught by teachers: with a width it is by prototypes.
    """

    network: str
    fields: SampleFields = MOVIELENS
    dim: int = 8
    attention: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        if self.network not in CLICK_MODELS:
            raise ValueError(
                f"there is no click model {self.network!r}; expected {', '.join(CLICK_MODELS)}"
            )
        if self.network == "din" and self.fields.history is None:
            raise ValueError("din reads a history: set SampleFields(history=<a categorical field>)")


class ClickModel(nn.Module):
    """A batch (see ``SampleFields``) to two logits [b, 2]: no click, click."""

    def __init__(self, design: ClickDesign) -> None:
        super().__init__()
        fields, dim, attention = design.fields, design.dim, design.attention
        self.kind = design.network
        first_order = self.kind in ("wide_deep", "deepfm")
        self.embedding = FieldEmbedding(fields, dim, extra=1 if first_order else 0)
        self.attention = FieldAttention(len(fields.names), dim, CHANNELS) if attention else None
        count = len(fields.names) + (1 if attention else 0)
        chosen = {} if design.width is None else {"width": design.width}
        self.network: nn.Module = _NETWORKS[self.kind](count, dim, **chosen)
        self._item = 0
        if fields.history is not None:
            self._item = fields.names.index(fields.history)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._forward(batch)[0]

    def embedded(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The embeddings [b, width] and the logits."""
        logits, embedding, _, _ = self._forward(batch)
        return embedding, logits

    def explained(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits, and ``embedding`` [b, width]; with attention ``field_weights`` [b, r] and
        ``field_interactions`` [r, r]."""
        logits, embedding, fields, weights = self._forward(batch)
        found = {"embedding": embedding}
        if self.attention is not None and weights is not None:
            interactions = self.attention.interactions(fields)
            found |= {"field_weights": weights, "field_interactions": interactions}
        return logits, found

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
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
            embedding, logits = self.network(encoded, plain[:, self._item], history, mask)
        elif self.kind == "cnn":
            embedding, logits = self.network(encoded)
        else:
            embedding, logits = self.network(encoded, embedded[:, :, dim])
        return logits, embedding, plain, weights


def click_model(design: ClickDesign, *, seed: int = 0) -> ClickModel:
    """A click model; ``seed`` draws the initial weights and leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ClickModel(design)


def predicted_clicks(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``logits`` [b, 2], ``click`` [b] (its probability), and the attention's weights if any."""
    found = embedded_clicks(model, batch)
    del found["embedding"]
    return found


def embedded_clicks(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`predicted_clicks`, and ``embedding`` [b, width]."""
    if not isinstance(model, ClickModel):
        raise TypeError(f"a ClickModel predicts clicks, not {type(model).__name__}")
    logits, more = model.explained(batch)
    return {"logits": logits, "click": torch.softmax(logits, -1)[:, 1], **more}


def example_clicks(
    design: ClickDesign, *, batch: int = 16, history: int = 6, seed: int = 0
) -> dict[str, Tensor]:
    """All batch entries of a design's artifact; ``history`` is there for din only, prototypes in
    place of teachers where the design has a width."""
    length = history if design.network == "din" else 0
    g = torch.Generator().manual_seed(seed)
    return {
        **example_fields(design.fields, batch=batch, history=length, seed=seed),
        "label": torch.randint(2, (batch,), generator=g),
        **(
            example_teachers(2, seed=seed)
            if design.width is None
            else example_prototypes(2, design.width, seed=seed)
        ),
    }


CLICK_METRICS = dict.fromkeys(("auc", "accuracy", "log_loss", "calibration"), ("logits", "label"))
"""What a click model may be evaluated by. Its loss takes teachers, which samples do not hold."""


def click_recipe(design: ClickDesign, *, seed: int = 0, with_proximal: bool = False) -> Recipe:
    """A click model with the distillation loss (``export.losses``).

    Plain cross-entropy is ``has_teacher`` = 0, ``weight_ce`` = 1, ``l2`` = 0. ``with_proximal``
    adds anchors and the batch scalar ``mu`` (``export.losses``). It may be evaluated by
    ``CLICK_METRICS``. Axes: ``batch``, and ``past`` for din's history. Adam with 1e-3, as in the
    paper.

    A design with a ``width`` is for the method ``prototypes``: the loss is
    ``export.losses.prototype_alignment``, and predictions hold ``embedding`` [b, width], the last
    hidden layer. ValueError where it comes with ``with_proximal``.
    """
    model: nn.Module = click_model(design, seed=seed)
    batch = example_clicks(design)
    loss = distillation(lambda module, entries: module(entries))
    if design.width is not None:
        if with_proximal:
            raise ValueError("width is for prototypes, whose loss has no proximal term: give one")
        loss = prototype_alignment(_embedded)
    if with_proximal:
        model = with_anchor(model)
        batch["mu"] = torch.tensor(0.1)
        loss = _pulled
    per_sample = ("categories", *dict(design.fields.multi_valued), "numbers", "label", "history")
    dynamic = {name: {0: "batch"} for name in per_sample if name in batch}
    if "history" in batch:
        dynamic["history"] = {0: "batch", 1: "past"}
    return Recipe(
        model,
        loss,
        batch,
        dynamic,
        predict=predicted_clicks if design.width is None else embedded_clicks,
        gradient=PENALTY if design.width is None else None,
        metrics=CLICK_METRICS,
        name=f"{design.network}_attention" if design.attention else design.network,
    )


def _embedded(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    assert isinstance(model, ClickModel)
    return model.embedded(batch)


def _pulled(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, outputs = joint_loss(model(batch), batch)
    return loss + proximal(model, batch["mu"]), outputs
