"""Activation checkpointing as a plain call.

A graph keeps what its backward pass needs. A recomputation during the backward pass would find the
model without this step's tensors in it, and would draw other dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint

from export.rewrites import Replacement


def _plain(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


# What ``torch.utils.checkpoint.checkpoint`` looks up when it is called, in both its ways. Since
# torch 2.14 the first has another name, and its old one is there for others alone.
REPLACED: list[Replacement] = [
    *(
        (torch.utils.checkpoint, name, _plain)
        for name in vars(torch.utils.checkpoint)
        if name.startswith("_checkpoint_without_reentrant_generator")
    ),
    (torch.utils.checkpoint, "CheckpointFunction", _Plain),
]
