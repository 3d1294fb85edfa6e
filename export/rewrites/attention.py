"""Scaled dot-product attention in as few passes over its scores as there can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import RECORDED
from export.short_gradients import ShortGradient

Shape = list[int]


def _transposed_times(a: Tensor, b: Tensor) -> Tensor:
    """a' b of [N, L, S] and [N, L, E], as (b' a)' where a is much the wider.

    onnxruntime's product of a wide transposed matrix is slow: 591 us for [128, 64, 64] and
    [128, 64, 16], and 455 the other way round.
    """
    rows, columns = a.shape[2], b.shape[2]
    if isinstance(rows, int) and isinstance(columns, int) and rows >= max(64, 4 * columns):
        return (b.transpose(1, 2) @ a).transpose(1, 2)
    return a.transpose(1, 2) @ b


def _scaled(product: Tensor, times: float) -> Tensor:
    return product if times == 1 else product * times


class _Attention(ShortGradient):
    """softmax(q k' + bias) v with its short gradient (Vaswani et al. 2017, equation 1).

    The gradient of the scores is weights * (gradient of weights - row's sum of weights * that);
    the sum is the row's sum of result * gradient of the result, with dropout as well, which is a
    pass over [L, E] and not over [L, S] (Dao et al. 2022, appendix B.2). Masked scores need no mask
    there: their weight is 0. q [N, L, D], k [N, S, D], v [N, S, E]; ``bias`` is added to scores of
    shape [*lead, L, S], N the product of ``lead``; ``kept`` [N, L, S] is 1 where dropout keeps a
    weight, which then counts ``times``: a factor of products, and no pass of its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        times: float,
        lead: Shape,
    ) -> Tensor:
        scores = query @ key.transpose(1, 2)
        if bias is None or bias.dim() == 2:
            weights = torch.softmax(scores if bias is None else scores + bias, -1)
        else:
            biased = scores.reshape(*lead, *scores.shape[1:]) + bias
            weights = torch.softmax(biased, -1).reshape(scores.shape)
        used = weights if kept is None else weights * kept
        result: Tensor = _scaled(used @ value, times)
        ctx.save_for_backward(query, key, value, bias, kept, weights, used, result)
        ctx.times, ctx.lead = times, lead
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, kept, weights, used, result = ctx.saved_tensors
        of_weights = _scaled(grad @ value.transpose(1, 2), ctx.times)
        if kept is not None:
            of_weights = of_weights * kept
        along = (grad * result).sum(-1, keepdim=True)
        of_scores = (of_weights - along) * weights
        of_bias = None
        if ctx.needs_input_grad[3]:
            shape = of_scores.shape if bias.dim() == 2 else [*ctx.lead, *of_scores.shape[1:]]
            of_bias = of_scores.reshape(shape).sum_to_size(bias.shape)
        return (
            of_scores @ key,
            _transposed_times(of_scores, query),
            _scaled(_transposed_times(used, grad), ctx.times),
            of_bias,
            None,
            None,
            None,
        )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Callable[[Shape, Tensor], tuple[Tensor | None, float]],
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``.

    drop: which weights of this shape and dtype dropout keeps (1, else 0; None for all), and how
    often each of them counts.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # One batch axis for both products: each of theirs would be folded and unfolded apart.
    lead = list(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    query, key, value = (
        t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (query, key, value)
    )
    rows, columns = query.shape[1], key.shape[1]
    bias, blind = None, None
    if is_causal:
        later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
        bias = torch.zeros(rows, columns, dtype=query.dtype).masked_fill(later, -math.inf)
    if attn_mask is not None:
        mask = attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -math.inf)
        mask = mask if bias is None else mask + bias
        # As in torch, a query that may look at nothing gets zeros instead of 0 / 0.
        blind = (mask == -math.inf).all(-1, keepdim=True)
        bias = mask.masked_fill(blind, 0.0)
    kept, times = drop([query.shape[0], rows, columns], query)
    result: Tensor = _Attention.apply(query * factor, key, value, bias, kept, times, lead)
    result = result.reshape(*lead, *result.shape[1:])
    return result if blind is None else result.masked_fill(blind, 0.0)


# The joint projection of self-attention as one product and a split.
#
# torch folds query, key and value into a stacked axis; the gradient of taking that apart is
# three padded tensors and two sums. A split's gradient is one concatenation.

_torchs_own: Callable[..., list[Tensor]] = vars(functional)["_in_projection_packed"]


def in_projection_packed(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None
) -> list[Tensor]:
    """``torch.nn.functional._in_projection_packed``: w [3 * e, e], b [3 * e] or None."""
    if q is k and k is v:
        # Of a transposed tensor torch would add the bias apart from the product.
        parts = functional.linear(q.contiguous(), w, b).split(q.shape[-1], dim=-1)
        return [part.contiguous() for part in parts]
    return _torchs_own(q, k, v, w, b)


RECORDED.replaces((functional, "_in_projection_packed", in_projection_packed))
