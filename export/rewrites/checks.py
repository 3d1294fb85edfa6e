"""torch's checks of its own, which read data, left out.

Each is an expectation of values that no graph has while it is recorded, and that the values of a
batch drawn anew need not meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from export.rewrites import Replacement

_NO_AXES = torch.Size()
_torchs_own = Distribution.__init__


def _unvalidated(
    self: Distribution,
    batch_shape: Any = _NO_AXES,
    event_shape: Any = _NO_AXES,
    validate_args: bool | None = None,
) -> None:
    _torchs_own(self, batch_shape, event_shape, validate_args=False)


def _declared(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    """Whether a mask is causal: where the caller says so. Any other is a mask like another."""
    return bool(is_causal)


REPLACED: list[Replacement] = [
    (Distribution, "__init__", _unvalidated),
    (Distribution, "_validate_args", False),
    (torch.nn.modules.transformer, "_detect_is_causal_mask", _declared),
]
