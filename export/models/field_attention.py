"""Attention over fields, before a model rather than inside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_EPS = 1e-6
_START = 0.02


class FieldAttention(nn.Module):
    """Embedded fields [b, r, dim] to their re-weighted map and its sum.

    AFD (papers/afd), equations 7 to 9 and section 2.4 (2), where this reading fills what is open:

    * Query Q [b, 1, dim]: a learned map of the direction of the mean field embedding.
    * Keys S [b, r, dim], apart from the values: the direction of a field's embedding, plus a
      learned vector of the field, scaled to unit length again. Embeddings start at a tenth: their
      bare products are about 1e-3, whose softmax is uniform, and which hardly train. The field's
      vector lets a query look for a field whatever its value. The map to Q starts close to 0, so
      that training starts from uniform weights and their gradient does not depend on how large
      embeddings are.
    * P = Q S^T, [b, 1, r] (equation 7).
    * Widened to m channels by a learned vector, [b, m, r]; softmax over the fields of each channel
      (equation 8 lacks the exponential); the mean over channels gives the weights a [b, r], which
      add up to 1. A softmax before a linear widening would make the channels' mean a mere scalar
      factor; after it, each channel is as sharp, or as contrary, as it learns to be.
    * Values V are the embeddings. The map is r * a_i * V_i: uniform weights leave it as it was, so
      the model behind need not make up for a factor of 1 / r. Its sum, sum a_i V_i, is equation 9.

    count: r, the number of fields.
    """

    def __init__(self, count: int, dim: int, channels: int = 32) -> None:
        super().__init__()
        if count < 1 or dim < 1 or channels < 1:
            raise ValueError(
                f"there are {count} fields, dim is {dim} and channels {channels}; "
                "expected at least 1 each"
            )
        self.query = nn.Linear(dim, dim)
        for parameter in self.query.parameters():
            nn.init.normal_(parameter, std=_START)
        self.place = nn.Parameter(torch.randn(count, dim) * dim**-0.5)
        # Between flat and sharp; equal channels would learn the same.
        self.widen = nn.Parameter(torch.linspace(0.25, 4.0, channels))

    def forward(self, fields: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map [b, r, dim], its sum [b, dim] and the weights [b, r]."""
        query = self.query(_unit(fields.mean(1)))
        scores = (query.unsqueeze(1) * self._keys(fields)).sum(-1)
        weights: Tensor = _ChannelMean.apply(scores, self.widen)  # type: ignore[no-untyped-call]
        summed = weights.unsqueeze(-1) * fields
        return summed * fields.shape[1], summed.sum(1), weights

    def interactions(self, fields: Tensor) -> Tensor:
        """[r, r]: how much field i, as the query, looks at field j; mean over the batch.

        The picture of the paper's figure 7. Rows add up to 1.
        """
        scores = self.query(_unit(fields)) @ self._keys(fields).transpose(1, 2)
        channels = scores.unsqueeze(1) * self.widen.reshape(1, -1, 1, 1)
        return torch.softmax(channels, -1).mean(1).mean(0)

    def _keys(self, fields: Tensor) -> Tensor:
        return _unit(_unit(fields) + self.place)


def _unit(vectors: Tensor) -> Tensor:
    """Vectors [..., dim] at length 1; a zero vector, such as a sample's without genres, stays."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPS)


class _ChannelMean(torch.autograd.Function):
    """mean over c of softmax(widen_c * scores): scores [b, r], widen [m] to [b, r].

    The gradient in closed form has two products of whole tensors in place of eight. With
    p [b, m, r] the softmaxes, g [b, r] the gradient of the mean, and s_c = sum_r g p_c:
    d / d(widen_c scores) = p_c (g - s_c) / m.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, widen: Tensor) -> Tensor:
        p = torch.softmax(scores.unsqueeze(1) * widen.reshape(1, -1, 1), -1)
        ctx.save_for_backward(scores, widen, p)
        return p.mean(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        scores, widen, p = ctx.saved_tensors
        g = grad / widen.shape[0]
        # [b, m, 3]: sums over fields of p times g, times g * scores, and times scores.
        s, of_both, of_scores = (p @ torch.stack([g, g * scores, scores], -1)).unbind(-1)
        # [b, 2, r]: sums over channels of widen * p and widen * s * p.
        plain, weighted = (torch.stack([widen.expand(s.shape), widen * s], 1) @ p).unbind(1)
        return g * plain - weighted, (of_both - s * of_scores).sum(0)
