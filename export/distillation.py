"""Federated distillation's joint loss: the labels, and what other devices predict for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from export import losses
from export.gradient_rules import WeightPenalty
from export.step import LossFunction

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
    entropy = losses.cross_entropy(logits, batch["label"], reduction="none")
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
