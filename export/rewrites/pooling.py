"""Means over images whose channels come last: torch would set a mean's strides over all places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import Equals

_torchs_mean: Callable[..., Tensor] = functional.adaptive_avg_pool2d


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """``torch.nn.functional.adaptive_avg_pool2d``."""
    return _torchs_mean(input.contiguous(), output_size)


EQUALS: Equals = {_torchs_mean: adaptive_avg_pool2d}
