"""Wide & Deep: remembered values beside generalising ones."""

from __future__ import annotations

from torch import Tensor, nn

from export.models.logits import two_logits


class WideDeep(nn.Module):
    """Embedded fields [b, r, dim] and first-order weights [b, r] to two logits [b, 2].

    Cheng et al. 2016, Wide & Deep learning for recommender systems, equation 3: the sum of a linear
    model on the raw values and a network on their embeddings (128, 64, 2 as in AFD's experiments,
    papers/afd, section 3.1). The wide part has no hand-made cross products.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(count * dim, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    def forward(self, fields: Tensor, first_order: Tensor) -> Tensor:
        deep: Tensor = self.deep(fields.flatten(1))
        return deep + two_logits(first_order.sum(1))
