"""Attention in as few passes over its scores as there can be; dropout from the run-time seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import RECORDED
from export.rewrites.randomness import Randomness
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


def plain_attention(
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


# Dropout with a mask that is a function of the run-time seed, in attention as well.


def replacements(
    randomness: Randomness, *, own_attention: bool = False
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What to patch so that dropout draws from ``randomness``.

    With ``own_attention``, attention without dropout stays torch's own.
    """
    torch_attention = functional.scaled_dot_product_attention

    def drawn(like: Tensor, p: float, shape: list[int]) -> tuple[Tensor | None, float]:
        """1 where an element is kept, else 0 (None: all are), and how often a kept one counts."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability is {p}; expected a number from 0 to 1")
        if p == 0:
            return None, 1.0
        if p == 1:
            return torch.zeros(shape, dtype=like.dtype), 1.0
        return randomness.keep_mask(shape, 1 - p).to(like.dtype), 1 / (1 - p)

    def masked(x: Tensor, p: float, shape: list[int]) -> Tensor:
        kept, times = drawn(x, p, shape)
        return x if kept is None else x * (kept * times)

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return masked(input, p, list(input.shape)) if training else input

    def channel_dropout(dims: int) -> Callable[..., Tensor]:
        def apply(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            if not training:
                return input
            lead = list(input.shape[: input.dim() - dims])
            return masked(input, p, lead + [1] * dims)

        return apply

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if own_attention and dropout_p == 0:
            return torch_attention(
                query,
                key,
                value,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        return plain_attention(
            query,
            key,
            value,
            attn_mask,
            is_causal,
            scale,
            enable_gqa,
            lambda shape, like: drawn(like, dropout_p, shape),
        )

    return [
        (functional, "dropout", dropout),
        (functional, "dropout1d", channel_dropout(1)),
        (functional, "dropout2d", channel_dropout(2)),
        (functional, "dropout3d", channel_dropout(3)),
        (functional, "scaled_dot_product_attention", attention),
    ]
