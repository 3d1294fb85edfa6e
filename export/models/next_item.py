"""A sequential recommender: what comes after a user's latest items.

GRU4Rec (Hidasi et al. 2016, Session-based recommendations with recurrent neural networks), with the
cross-entropy over all items of Hidasi & Karatzoglou 2018 in place of sampled losses. Its width is
the latent dimension k, which costs a step compute as well as bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from export.build import Recipe
from export.optimizers import Adam

PADDING = 0
"""In the place of an item where a user has fewer; real items are numbered from 1."""
DYNAMIC = {"items": {0: "users"}}


class NextItem(nn.Module):
    """Items [b, t] int64, the oldest first and padded in front, to scores [b, t, items] of what
    comes after each: products of the GRU's state and the items' own vectors, and a bias an item.
    Item i is column i - 1.

    items: of the catalogue.
    width: k, of items' vectors and of the state.
    seed: of the first weights.
    """

    def __init__(self, items: int, width: int, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.items = nn.Embedding(items + 1, width, padding_idx=PADDING)
            self.gru = nn.GRU(width, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(items))
        with torch.no_grad():
            self.items.weight.mul_(width**-0.5)

    def forward(self, items: Tensor) -> Tensor:
        states, _ = self.gru(self.items(items))
        scores: Tensor = states @ self.items.weight[1:].T + self.bias
        return scores


def next_item_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of each item but the first given those before it; padding is no item."""
    items = batch["items"]
    scores, nothing = model(items[:, :-1]), PADDING - 1
    next_ones = (items[:, 1:] - 1).flatten()
    return functional.cross_entropy(scores.flatten(0, 1), next_ones, ignore_index=nothing)


def next_scores(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``scores`` [b, items] of what comes after the last item."""
    return {"scores": model(batch["items"])[:, -1]}


def next_item_recipe(model: NextItem, *, length: int = 51) -> Recipe:
    """Its artifact: ``Trainer.step({"items": ...})`` with windows int64 [users, length], each a
    user's items padded in front; any number of users. It may be evaluated by the loss."""
    g = torch.Generator().manual_seed(0)
    items = model.items.num_embeddings - 1
    example = torch.randint(1, items + 1, (8, length), generator=g)
    example[0, : length // 2] = PADDING
    return Recipe(
        model,
        next_item_loss,
        {"items": example},
        DYNAMIC,
        Adam(lr=1e-3),
        predict=next_scores,
        metrics={"loss": "loss"},
        name=f"next{model.items.embedding_dim}",
    )
