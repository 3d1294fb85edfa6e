"""The joint projection of self-attention as one product and a split.

torch folds query, key and value into a stacked axis; the gradient of taking that apart is three
padded tensors and two sums. A split's gradient is one concatenation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as functional
from torch import Tensor

_torchs_own: Callable[..., list[Tensor]] = vars(functional)["_in_projection_packed"]


def in_projection_packed(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None
) -> list[Tensor]:
    """``torch.nn.functional._in_projection_packed``: w [3 * e, e], b [3 * e] or None."""
    if q is k and k is v:
        parts = functional.linear(q, w, b).split(q.shape[-1], dim=-1)
        return [part.contiguous() for part in parts]
    return _torchs_own(q, k, v, w, b)
