"""Bags of embeddings as a lookup and a sum."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import Replacement


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``torch.nn.functional.embedding_bag`` in modes sum and mean.

    input int64 [bags, n], or [total] with ``offsets`` [bags]; result float32 [bags, dim].
    """
    if mode not in ("sum", "mean"):
        raise ExportError(
            f"embedding bags in mode {mode!r}", operator="embedding_bag", instead="sum or mean"
        )
    if max_norm is not None or scale_grad_by_freq:
        raise ExportError(
            "max_norm and scale_grad_by_freq change the table outside the optimizer",
            operator="embedding_bag",
            instead="a penalty in the loss",
        )
    rows = functional.embedding(input, weight)
    counted = torch.ones_like(input).to(weight.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        rows = rows * counted.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), counted.sum(1)
    else:
        # A lookup that refuses the offsets that torch refuses: those beyond the input.
        ends = torch.zeros(input.shape[0] + 1, dtype=offsets.dtype)
        offsets = offsets + ends.index_select(0, offsets)
        starts = offsets[:-1] if include_last_offset else offsets
        position = torch.arange(input.shape[0])
        bag = (position.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
        empty = torch.zeros(starts.shape[0], weight.shape[1], dtype=weight.dtype)
        total = empty.index_add(0, bag, rows)
        count = torch.zeros(starts.shape[0], dtype=weight.dtype).index_add(0, bag, counted)
    if mode == "sum":
        return total
    return total / count.clamp(min=1).unsqueeze(-1)


REPLACED: list[Replacement] = [(functional, "embedding_bag", embedding_bag)]
