"""What functions of torch are called with: tensors and plain values, in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` done to all that is in its lists, tuples and dicts.

    A ``torch.Size`` is one value: taken apart and put together it would be a tuple, and
    ``x.new(size)`` a tensor of it. torch's ``tree_map`` takes ten times as long, and this runs at
    each call while a step is recorded or verified.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([changed(change, each) for each in value])
    if kind is dict:
        return {key: changed(change, each) for key, each in value.items()}
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return kind(*[changed(change, each) for each in value])
    return change(value)
