"""Matrix factorisation with the BPR loss: the model of scatter aggregation.

Rendle et al. 2009 (BPR, eq. 3 and section 4.3.1) on the factorisation of papers/adaptive_k,
paragraph 39: r_ij = u_i . v_j. One artifact serves every number of users and items and every
latent dimension k, since all three are named axes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.build import Recipe
from export.optimizers import Sgd
from export.short_gradients import ShortGradient


class MatrixFactorisation(nn.Module):
    """User vectors [users, k] and item vectors [items, k]; a score is their inner product."""

    def __init__(
        self, users: int, items: int, k: int, *, seed: int = 0, scale: float = 0.1
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.users = nn.Embedding(users, k)
        self.items = nn.Embedding(items, k)
        with torch.no_grad():
            self.users.weight.copy_(torch.randn(users, k, generator=generator) * scale)
            self.items.weight.copy_(torch.randn(items, k, generator=generator) * scale)

    def scores(self) -> Tensor:
        """Every user's score of every item, [users, items]."""
        return self.users.weight @ self.items.weight.T


class _Bpr(ShortGradient):
    """The loss below with its gradient in closed form: half the work of the recorded one.

    With margin_t = u.(p - n) + offset_t and s_t = w_t * sigmoid(-margin_t):
    d/du = l2_users * w * u - s * (p - n); d/dp = l2_items * w * p - s * u;
    d/dn = l2_items * w * n + s * u; each times its side's rate.
    """

    plain = False

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, items: Tensor, weight: Tensor, offset: Tensor, *settings: Tensor
    ) -> Tensor:
        """u [triples, k]; items [2 * triples, k]: the positives, then the negatives."""
        _, _, l2_users, l2_items = settings
        positive, negative = items.split(u.shape[0])
        gap = positive - negative
        margin = (u * gap).sum(-1) + offset
        ctx.save_for_backward(u, items, weight, gap, margin, *settings)
        of_items = (items * items).sum(-1).reshape(2, u.shape[0]).sum(0)
        penalty = (u * u).sum(-1) * (0.5 * l2_users) + of_items * (0.5 * l2_items)
        return (weight * (functional.softplus(-margin) + penalty)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, items, weight, gap, margin, rate_users, rate_items, l2_users, l2_items = (
            ctx.saved_tensors
        )
        weight = (weight * grad).unsqueeze(-1)
        slope = weight * torch.sigmoid(-margin).unsqueeze(-1)
        grad_u = u * (weight * (l2_users * rate_users)) - gap * (slope * rate_users)
        pull = u * (slope * rate_items)
        decay = weight * (l2_items * rate_items)
        grad_items = items * torch.cat([decay, decay]) + torch.cat([-pull, pull])
        return grad_u, grad_items, *[None] * 6


def bpr_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum over triples t of w_t * (softplus(-(u.(p - n) + offset_t)) + L2 terms).

    The L2 terms are l2_users / 2 * |u|^2 + l2_items / 2 * (|p|^2 + |n|^2).

    batch: user, positive, negative int64 [triples] (rows); weight, offset float32 [triples];
    rate_users, rate_items, l2_users, l2_items float32 []. ``offset`` is the part of the score that
    is held fixed (the left-out columns of residual scores). The rates multiply the gradients of
    each side, so that a step may move users only.
    """
    if not isinstance(model, MatrixFactorisation):
        raise TypeError(f"bpr_loss takes a MatrixFactorisation, not {type(model).__name__}")
    items = model.items(torch.cat([batch["positive"], batch["negative"]]))
    settings = [batch[name] for name in ("rate_users", "rate_items", "l2_users", "l2_items")]
    loss: Tensor = _Bpr.apply(
        model.users(batch["user"]), items, batch["weight"], batch["offset"], *settings
    )
    return loss


def scores(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prediction: ``scores`` [users, items]."""
    if not isinstance(model, MatrixFactorisation):
        raise TypeError(f"scores takes a MatrixFactorisation, not {type(model).__name__}")
    return {"scores": model.scores()}


DYNAMIC = {
    "users.weight": {0: "users", 1: "k"},
    "items.weight": {0: "items", 1: "k"},
    **{name: {0: "triples"} for name in ("user", "positive", "negative", "weight", "offset")},
}


def example_batch(users: int, items: int, triples: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random triples, for tracing and verification."""
    g = torch.Generator().manual_seed(seed)
    return {
        "user": torch.randint(users, (triples,), generator=g),
        "positive": torch.randint(items, (triples,), generator=g),
        "negative": torch.randint(items, (triples,), generator=g),
        "weight": torch.rand(triples, generator=g) + 0.5,
        "offset": torch.randn(triples, generator=g) * 0.1,
        "rate_users": torch.tensor(0.7),
        "rate_items": torch.tensor(1.3),
        "l2_users": torch.tensor(0.01),
        "l2_items": torch.tensor(0.02),
    }


def mf_recipe() -> Recipe:
    """The factorisation: its sizes, all of them free, are only those of the example."""
    users, items, k, triples = 2, 24, 8, 48
    return Recipe(
        MatrixFactorisation(users, items, k),
        bpr_loss,
        example_batch(users, items, triples),
        DYNAMIC,
        Sgd(lr=1.0),
        predict=scores,
        name="mf",
    )
