"""Dropout with a mask that is a function of the run-time seed, in attention as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites.attention import attention as plain_attention
from export.rewrites.randomness import Randomness


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
