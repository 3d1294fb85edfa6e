"""Dropout and attention whose masks are functions of the run-time seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites.randomness import Randomness


def replacements(
    randomness: Randomness, *, own_attention: bool = False
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What to patch so that dropout draws from ``randomness``.

    With ``own_attention``, attention without dropout stays torch's own.
    """
    torch_attention = functional.scaled_dot_product_attention

    def masked(x: Tensor, p: float, shape: list[int]) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability is {p}; expected a number from 0 to 1")
        if p == 0:
            return x
        if p == 1:
            return x * 0
        return x * (randomness.keep_mask(shape, 1 - p).to(x.dtype) * (1 / (1 - p)))

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
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        # One batch axis for both products: each of theirs would be folded and unfolded apart.
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (
            t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (query, key, value)
        )
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            rows, columns = query.shape[-2], key.shape[-2]
            later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        if attn_mask is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            # As in torch, a query that may look at nothing gets zeros instead of 0 / 0.
            scores = scores.reshape(*lead, *scores.shape[-2:])
            if attn_mask.dtype == torch.bool:
                blind = ~attn_mask.any(-1, keepdim=True)
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                blind = (attn_mask == float("-inf")).all(-1, keepdim=True)
                scores = scores + attn_mask
            weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1)
            weights = weights.masked_fill(blind, 0.0).reshape(-1, *weights.shape[-2:])
        result = dropout(weights, dropout_p, dropout_p > 0) @ value
        return result.reshape(*lead, *result.shape[-2:])

    return [
        (functional, "dropout", dropout),
        (functional, "dropout1d", channel_dropout(1)),
        (functional, "dropout2d", channel_dropout(2)),
        (functional, "dropout3d", channel_dropout(3)),
        (functional, "scaled_dot_product_attention", attention),
    ]
