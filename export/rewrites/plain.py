"""What torch does beside a step's result, left out.

Checks of its own that read data, ways to the same result that save time or memory, and what Python
makes of a tensor's length.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch import Tensor
from torch.distributions import Distribution

from export.rewrites import BESIDE, RECORDED

# Checks are expectations of values that no graph has while it is recorded, and that the values of a
# batch drawn anew need not meet.

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


# Activation checkpointing is a plain call. A graph keeps what its backward pass needs; a
# recomputation during that would find the model without this step's tensors in it, and would draw
# other dropout masks.


def _plain(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


for _table in (RECORDED, BESIDE):
    _table.replaces(
        (Distribution, "__init__", _unvalidated),
        (Distribution, "_validate_args", False),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", _declared),
        # What ``torch.utils.checkpoint.checkpoint`` looks up when it is called, in both its ways.
        # Since torch 2.14 the first has another name, and its old one is there for others alone.
        *(
            (torch.utils.checkpoint, name, _plain)
            for name in vars(torch.utils.checkpoint)
            if name.startswith("_checkpoint_without_reentrant_generator")
        ),
        (torch.utils.checkpoint, "CheckpointFunction", _Plain),
    )


# Gradients of tables without their zeros, logits of many classes by pieces.


def _without(own: Callable[..., Any], argument: str) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        given = signature(own).bind(*args, **kwargs)
        given.arguments.pop(argument, None)
        return own(**given.arguments)

    return plain


_BY_PIECES = getattr(functional, "linear_cross_entropy", None)  # since torch 2.13
for _table in (RECORDED, BESIDE):
    _table.equals({functional.embedding_bag: _without(functional.embedding_bag, "sparse")})
    if _BY_PIECES is not None:
        _table.equals({_BY_PIECES: _without(_BY_PIECES, "options")})
# Recorded, lookups are plain in ``lookups``.
BESIDE.equals({functional.embedding: _without(functional.embedding, "sparse")})


_len = len


def length(value: Any) -> Any:
    """``len``; of a tensor, its first size, of which Python's own would make a number."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else _len(value)


RECORDED.replaces((builtins, "len", length))
