"""Matrix factorisation with the BPR loss: the model of scatter aggregation.

Rendle et al. 2009 (BPR, eq. 3 and section 4.3.1) on the factorisation of papers/adaptive_k,
paragraph 39: r_ij = u_i . v_j. One artifact serves every number of users and items and every
latent dimension k, since all three are named axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.build import Exported, export_train_step
from export.optimizers import Sgd


class MatrixFactorisation(nn.Module):
    """User vectors [users, k] and item vectors [items, k]; a score is their inner product."""

    def __init__(self, users: int, items: int, k: int, *, seed: int = 0, scale: float = 0.1) -> None:
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


class _AtRate(torch.autograd.Function):
    """The identity, with its gradient multiplied by a run-time number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: Tensor) -> Tensor:
        ctx.save_for_backward(rate)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rate,) = ctx.saved_tensors
        return grad * rate, None


def bpr_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum over triples t of w_t * (softplus(-(u.(p - n) + offset_t)) + L2 terms).

    batch: user, positive, negative int64 [triples] (rows); weight, offset float32 [triples];
    rate_users, rate_items, l2_users, l2_items float32 []. ``offset`` is the part of the score that
    is held fixed (the left-out columns of residual scores). The rates multiply the gradients of
    each side, so that a step may move users only.
    """
    assert isinstance(model, MatrixFactorisation)
    u = at_rate(model.users(batch["user"]), batch["rate_users"])
    both = torch.cat([batch["positive"], batch["negative"]])
    items = at_rate(model.items(both), batch["rate_items"])
    p, n = items.chunk(2)
    weight = batch["weight"]
    margin = (u * (p - n)).sum(-1) + batch["offset"]
    ranking = (weight * functional.softplus(-margin)).sum()
    of_users = (weight * (u * u).sum(-1)).sum() * (0.5 * batch["l2_users"])
    of_items = (weight * (p * p + n * n).sum(-1)).sum() * (0.5 * batch["l2_items"])
    return ranking + of_users + of_items


def at_rate(x: Tensor, rate: Tensor) -> Tensor:
    """``x``, with the gradient that flows back through it multiplied by ``rate`` (a scalar)."""
    result: Tensor = _AtRate.apply(x, rate)  # type: ignore[no-untyped-call]
    return result


def scores(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prediction: ``scores`` [users, items]."""
    assert isinstance(model, MatrixFactorisation)
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


def export_mf(
    directory: str | Path,
    *,
    users: int = 2,
    items: int = 24,
    k: int = 8,
    triples: int = 48,
    verify: bool = True,
) -> Exported:
    """Write the factorisation artifact; the sizes are only its initial example."""
    return export_train_step(
        MatrixFactorisation(users, items, k),
        bpr_loss,
        example_batch(users, items, triples),
        optimizer=Sgd(lr=1.0),
        dynamic=DYNAMIC,
        predict=scores,
        directory=directory,
        verify=verify,
        name="mf",
    )
