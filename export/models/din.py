"""Deep interest network: what of the past matters for this item."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Din(nn.Module):
    """Embedded fields [b, r, dim], the item and the user's past items to two logits [b, 2].

    Zhou et al. 2018, Deep interest network for click-through rate prediction, section 4.3: an
    activation unit weighs each past item h by a small network on (h, h - t, h * t, t), t the item
    in question; the weighted sum, not normalised, joins the fields. Hidden units 32 and layers of
    80, 40 and 2 as in AFD's experiments (papers/afd, section 3.1).
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.Linear(4 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.head = nn.Sequential(
            nn.Linear((count + 1) * dim, 80),
            nn.ReLU(),
            nn.Linear(80, 40),
            nn.ReLU(),
            nn.Linear(40, 2),
        )

    def forward(self, fields: Tensor, item: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """item [b, dim]; history [b, length, dim]; mask [b, length], 0 where there is no item."""
        target = item.unsqueeze(1).expand(history.shape)
        pairs = torch.cat([history, history - target, history * target, target], -1)
        weight = self.activation(pairs).squeeze(-1) * mask
        interest = (weight.unsqueeze(1) @ history).squeeze(1)
        logits: Tensor = self.head(torch.cat([fields.flatten(1), interest], 1))
        return logits
