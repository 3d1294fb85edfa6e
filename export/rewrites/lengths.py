"""The length of a tensor whose first axis is free: Python's own makes a number of it."""

from __future__ import annotations

import builtins
from typing import Any

from torch import Tensor

from export.rewrites import Replacement

_len = len


def length(value: Any) -> Any:
    """``len``; of a tensor, its first size."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else _len(value)


REPLACED: list[Replacement] = [(builtins, "len", length)]
