"""Losses for train steps, each a scalar mean (or sum) over the batch.

They use torch operators only, so they can be used in ordinary training as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.gradient_rules import WeightPenalty
from export.step import LossFunction

Reduction = Literal["mean", "sum", "none"]


def _reduce(losses: Tensor, weight: Tensor | None, reduction: Reduction) -> Tensor:
    """Per-sample losses to one number; a weighted mean is divided by the sum of the weights."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if weight is not None:
        losses = losses * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if weight is None else losses.sum() / weight.sum()


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """-log softmax(logits)[target].

    logits [b, classes]; target int64 [b] (hard labels) or float [b, classes] (soft labels);
    weight [b], a weight a sample. A hard label outside 0..classes-1 makes its loss NaN, and a
    device refuses the step; where its weight is 0, it does not count.
    """
    log_probability = torch.log_softmax(logits, dim=-1)
    if target.is_floating_point():
        return _reduce(-(target * log_probability).sum(-1), weight, reduction)
    classes = torch.arange(logits.shape[-1])
    hot = (target.unsqueeze(-1) == classes).to(logits.dtype)
    found = hot.sum(-1)
    if weight is not None:
        found = torch.where(weight == 0, torch.ones_like(found), found)
    # Divided by 1; by 0, where the label is no class.
    return _reduce(-(hot * log_probability).sum(-1) / found, weight, reduction)


def kl_divergence(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """KL(target || softmax(logits)), summed over classes.

    logits [b, classes]; target float [b, classes], each row a distribution (zeros allowed).
    """
    log_probability = torch.log_softmax(logits, dim=-1)
    positive = target > 0
    log_target = torch.log(torch.where(positive, target, torch.ones_like(target)))
    return _reduce((target * (log_target - log_probability)).sum(-1), weight, reduction)


def binary_cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """-(y log sigmoid(x) + (1 - y) log(1 - sigmoid(x))), in the form that cannot overflow.

    logits and target (0 to 1) of one shape; weight of that shape.
    """
    target = target.to(logits.dtype)
    losses = functional.softplus(logits) - logits * target
    return _reduce(losses, weight, reduction)


def mean_squared_error(
    prediction: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """(prediction - target)^2; all of one shape."""
    difference = prediction - target
    return _reduce(difference * difference, weight, reduction)


def bpr(
    positive: Tensor,
    negative: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """-log sigmoid(positive - negative): Bayesian personalised ranking (Rendle et al. 2009, eq. 3).

    Scores of seen and unseen items, of one shape.
    """
    return _reduce(functional.softplus(negative - positive), weight, reduction)


CLIP = 1e-4
"""Least probability of a teacher: its logarithm is taken."""

PENALTY = WeightPenalty("l2")
"""lambda / 2 * |w|^2: pass it as ``gradient=`` beside the loss."""

Logits = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def distillation(logits: Logits) -> LossFunction:
    """The loss of AFD (papers/afd, equations 1 to 4) for a model with these logits.

    logits: ``logits(model, batch)`` gives [b, classes].

    batch, besides the model's own entries: ``label`` int64 [b]; ``teacher`` float32
    [classes, classes], the other devices' mean softmax outputs for each label (row = label);
    ``has_teacher`` float32 [classes], 1 where the row is one, 0 where nobody else has the label;
    the scalars ``weight_ce`` (alpha), ``weight_teacher`` (beta), ``weight_kl`` (1 - alpha - beta in
    the paper) and, by ``PENALTY``, ``l2`` (lambda).

    loss = mean over samples of
        weight_ce * CE(p, label)
        + has_teacher[label] * (weight_teacher * (-sum T log p) + weight_kl * sum p log(p / T))
        + l2 / 2 * |w|^2,
    with p the softmax output and T the teacher's row of the sample's label, clipped at 1e-4. The
    learner gives rows that add up to 1, or to less where it divides by all devices (equation 6).
    Round 1, and a label without teacher, are has_teacher = 0: what is left is
    equation 3's first case. Jeong's federated distillation is weight_kl = l2 = 0.

    The paper writes the second term as the teacher's own error against the label, and the third as
    a divergence between two losses; neither has a gradient in w where the teacher is a table. This
    is the reading that trains.

    outputs, for the device to add up over a round: ``label_sums`` float32 [classes, classes], the
    softmax outputs (before the step) summed by label; ``label_counts`` float32 [classes]. And
    ``student_loss`` float32 [], the mean cross-entropy alone.
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return joint_loss(logits(model, batch), batch)

    return loss


def joint_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and outputs that ``distillation`` describes, from logits [b, classes]."""
    log_p = torch.log_softmax(logits, -1)
    p = torch.exp(log_p)
    labels = torch.arange(batch["teacher"].shape[0])
    hot = (batch["label"].unsqueeze(-1) == labels).to(logits.dtype)
    # Equal to rows by index, and free: the table is tiny.
    table = torch.log(batch["teacher"].clamp(min=CLIP))
    log_t = hot @ table
    taught = hot @ batch["has_teacher"]
    entropy = cross_entropy(logits, batch["label"], reduction="none")
    towards = -(torch.exp(log_t) * log_p).sum(-1)
    divergence = (p * (log_p - log_t)).sum(-1)
    joint = batch["weight_ce"] * entropy + taught * (
        batch["weight_teacher"] * towards + batch["weight_kl"] * divergence
    )
    held = p.detach()
    outputs = {
        "label_sums": hot.T @ held,
        "label_counts": hot.sum(0),
        "student_loss": entropy.mean(),
    }
    return joint.mean(), outputs


def example_teachers(classes: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The entries that the loss takes besides ``label``, to trace and verify with.

    Includes ``l2``. The last label has no teacher.
    """
    g = torch.Generator().manual_seed(seed)
    table = torch.softmax(torch.randn(classes, classes, generator=g), -1)
    has = torch.ones(classes)
    table[-1], has[-1] = 0, 0
    return {
        "teacher": table,
        "has_teacher": has,
        "weight_ce": torch.tensor(0.6),
        "weight_teacher": torch.tensor(0.3),
        "weight_kl": torch.tensor(0.1),
        "l2": torch.tensor(1e-3),
    }


Embedded = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]]


def prototype_alignment(embedded: Embedded) -> LossFunction:
    """The loss of FedProto for a model with these embeddings and logits.

    Tan et al. 2022, FedProto: Federated prototype learning across heterogeneous clients (AAAI),
    equation 7, with the distance d that its authors' code takes: the mean squared difference
    between each sample's embedding and the prototype of its label. FedTGP (Zhang et al. 2024) has
    the same.

    embedded: ``embedded(model, batch)`` gives embeddings [b, width] and logits [b, classes].

    batch, besides the model's own entries: ``label`` int64 [b]; ``prototype`` float32
    [classes, width], a row for each label; ``has_prototype`` float32 [classes], 1 where the row is
    one, 0 where nobody has the label yet; the scalar ``pull`` (lambda).

    loss = mean over samples of
        CE(p, label) + pull * has_prototype[label] * mean over width of (embedding - prototype)^2

    outputs: ``cross_entropy`` and ``distance`` float32 [], the two terms without ``pull``.
    """

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        embedding, logits = embedded(model, batch)
        labels = torch.arange(batch["prototype"].shape[0])
        hot = (batch["label"].unsqueeze(-1) == labels).to(embedding.dtype)
        # Rows by a product: equal to those by index, whose label nothing here would check.
        gap = embedding - hot @ batch["prototype"]
        known = hot @ batch["has_prototype"]
        distance = (known * (gap * gap).mean(-1)).mean()
        entropy = cross_entropy(logits, batch["label"])
        outputs = {"cross_entropy": entropy, "distance": distance}
        return entropy + batch["pull"] * distance, outputs

    return loss


def example_prototypes(classes: int, width: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The entries that the loss takes besides ``label``, to trace and verify with.

    The last label has no prototype.
    """
    g = torch.Generator().manual_seed(seed)
    has = torch.ones(classes)
    has[-1] = 0
    return {
        "prototype": torch.randn(classes, width, generator=g) * has.unsqueeze(-1),
        "has_prototype": has,
        "pull": torch.tensor(0.5),
    }


ANCHOR = "anchor"


class _Anchors(nn.Module):
    """Holds buffers. It passes its input on, since a Sequential runs all its children."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_anchor(model: nn.Module) -> nn.Module:
    """Give the model a buffer ``anchor.<parameter>`` for each trained parameter; returns the model.

    Anchors start as copies of the parameters. A device sets them when a round begins:

        trainer.set_parameters({f"anchor.{name}": value for name, value in downloaded.items()})

    They are part of the artifact's state, are no parameters (no optimizer moves them, an average
    of parameters does not hold them), and prediction does not read them. ValueError where the
    model has something of that name already.
    """
    if hasattr(model, ANCHOR):
        raise ValueError(
            f"the model already has {ANCHOR!r}; with_anchor is called once for each model"
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    root = _Anchors()
    for name, parameter in trained:
        *path, last = name.split(".")
        holder: nn.Module = root
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, _Anchors())
            holder = holder.get_submodule(part)
        holder.register_buffer(last, parameter.detach().clone())
    model.add_module(ANCHOR, root)
    return model


def proximal(model: nn.Module, mu: Tensor) -> Tensor:
    """mu / 2 * |w - anchor|^2 over all trained parameters; add it to a loss.

    Li et al. 2020, Federated optimization in heterogeneous networks (FedProx), equation 2. ``mu``
    is a float32 scalar of the batch, so one artifact serves every mu; mu = 0 is FedAvg. Raises
    ValueError for a model that ``with_anchor`` has not prepared.
    """
    anchors = {n: b for n, b in model.named_buffers() if n.startswith(f"{ANCHOR}.")}
    if not anchors:
        raise ValueError("the model has no anchor; give it one by with_anchor(model)")
    parameters = dict(model.named_parameters())
    here = torch.cat([parameters[name[len(ANCHOR) + 1 :]].reshape(-1) for name in anchors])
    there = torch.cat([anchor.reshape(-1) for anchor in anchors.values()])
    gap = here - there
    return 0.5 * mu * (gap * gap).sum()
