"""One score as the two logits that soft labels are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def two_logits(score: Tensor) -> Tensor:
    """Scores [b] to logits [b, 2] whose softmax is (1 - sigmoid(score), sigmoid(score))."""
    return torch.stack([torch.zeros_like(score), score], 1)
