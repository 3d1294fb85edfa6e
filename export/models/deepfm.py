"""DeepFM: a factorisation machine and a network on the same embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from export.models.logits import two_logits


class DeepFm(nn.Module):
    """Embedded fields [b, r, dim] and first-order weights [b, r] to two logits [b, 2].

    Guo et al. 2017, DeepFM, equations 1 to 4: first-order weights, the inner products of all pairs
    of fields (half of the sum's square less the sum of squares), and a network of 64 and 32.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(count * dim, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, fields: Tensor, first_order: Tensor) -> Tensor:
        total = fields.sum(1)
        pairs = 0.5 * ((total * total).sum(1) - (fields * fields).sum((1, 2)))
        deep: Tensor = self.deep(fields.flatten(1)).squeeze(1)
        return two_logits(first_order.sum(1) + pairs + deep)
