"""Mixtures of experts: rows sorted by their expert, and one product for all experts.

``transformers`` counts the rows of each expert with ``histc`` and multiplies them by
``torch.nn.functional.grouped_mm``, which torch records for bfloat16 only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.rewrites import BESIDE, RECORDED


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """``torch.histc`` between two given ends: how many elements each of equal bins holds."""
    if not min < max:
        return torch.histc(input, bins, min, max)
    flat = input.detach().reshape(-1, 1)
    place = ((flat - min) * (bins / (max - min))).floor().clamp(max=bins - 1)
    place = torch.where((flat >= min) & (flat <= max), place, -1.0)
    return (place == torch.arange(bins)).to(input.dtype).sum(0)


def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """``torch._grouped_mm`` of rows [n, k] and matrices [groups, k, m]: [n, m].

    Group g's rows end before ``offs[g]``, int32 [groups]; rows behind the last group are 0. Each
    row stands in its group's columns among zeros, so that one product does for all groups.
    """
    if offs is None or bias is not None or (input.dim(), mat2.dim()) != (2, 3):
        return torch._grouped_mm(input, mat2, offs, bias, out_dtype)
    groups, inner, outer = mat2.shape
    group = (torch.arange(input.shape[0]).unsqueeze(1) >= offs).sum(1, keepdim=True)
    own = (group == torch.arange(groups)).to(input.dtype)
    wide = (own.unsqueeze(2) * input.unsqueeze(1)).reshape(-1, groups * inner)
    return wide @ mat2.reshape(groups * inner, outer)


for _table in (RECORDED, BESIDE):  # torch's own exist in few precisions only
    _table.equals({torch._grouped_mm: grouped_mm, torch.histc: histc, Tensor.histc: histc})
