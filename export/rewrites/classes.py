"""One-hot rows that refuse a class that is none."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import Equals


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``, which is recorded as a comparison that is true of no class.

    As a lookup first, it refuses what torch refuses.
    """
    classes = torch.arange(input.max().item() + 1 if num_classes == -1 else num_classes)
    return (functional.embedding(input, classes.unsqueeze(1)) == classes).to(torch.int64)


EQUALS: Equals = {functional.one_hot: one_hot}
