"""Dropout and attention with a mask that is a function of the run-time seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites.randomness import Randomness


def replacements(randomness: Randomness) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What to patch so that dropout draws from ``randomness``."""

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
        if enable_gqa:
            raise ExportError(
                "grouped-query attention",
                operator="scaled_dot_product_attention",
                instead="key and value repeated for each query head",
            )
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            rows, columns = query.shape[-2], key.shape[-2]
            later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        weights = torch.softmax(scores, dim=-1)
        return dropout(weights, dropout_p, dropout_p > 0) @ value

    return [
        (functional, "dropout", dropout),
        (functional, "dropout1d", channel_dropout(1)),
        (functional, "dropout2d", channel_dropout(2)),
        (functional, "dropout3d", channel_dropout(3)),
        (functional, "scaled_dot_product_attention", attention),
    ]
