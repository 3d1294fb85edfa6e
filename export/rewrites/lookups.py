"""Bags of embeddings as a lookup and a sum, lookups that first shorten the rows they read, and
one-hot rows that refuse a class that is none."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import RECORDED, TRAINED


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
    """``torch.nn.functional.embedding_bag``.

    input int64 [bags, n], or [total] with ``offsets`` [bags]; result float32 [bags, dim].
    """
    if mode == "max" and offsets is not None:
        raise ExportError(
            "embedding bags in mode 'max' by offsets",
            operator="embedding_bag",
            instead="bags of one length [bags, n], with padding_idx in the places left over",
        )
    if scale_grad_by_freq:
        raise ExportError(
            "an embedding's gradient scaled by frequency",
            operator="embedding_bag",
            instead="scale_grad_by_freq=False",
        )
    rows = embedding(input, weight, max_norm=max_norm, norm_type=norm_type)
    counted = torch.ones_like(input).to(weight.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        if mode == "max":
            return _largest(rows, counted.unsqueeze(-1) > 0)
        rows = rows * counted.unsqueeze(-1)
    if mode == "max":
        return _largest(rows, torch.ones_like(rows, dtype=torch.bool))
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


def _largest(rows: Tensor, counted: Tensor) -> Tensor:
    """The largest counted element of each bag, by the first of equal ones; 0 in an empty bag."""
    counted = counted.expand(rows.shape)
    place = rows.masked_fill(~counted, float("-inf")).argmax(1, keepdim=True)
    found = rows.gather(1, place).squeeze(1)
    return found * counted.any(1)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.nn.functional.embedding``; ``max_norm`` shortens the table's rows, as torch does."""
    if max_norm is not None:
        with torch.no_grad():
            places = input.reshape(-1)
            rows = functional.embedding(places, weight)
            norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
            # torch's own term against a division by zero.
            shorter = rows * (max_norm / (norms + 1e-7))
            weight[places] = torch.where(norms > max_norm, shorter, rows)
    return functional.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``, which is recorded as a comparison that is true of no class.

    As a lookup first, it refuses what torch refuses.
    """
    classes = torch.arange(input.max().item() + 1 if num_classes == -1 else num_classes)
    return (functional.embedding(input, classes.unsqueeze(1)) == classes).to(torch.int64)


RECORDED.equals({functional.embedding: embedding})
RECORDED.replaces((functional, "embedding_bag", embedding_bag))
TRAINED.equals({functional.one_hot: one_hot})
