"""Wrapping a method of a class for one test process: the product knows nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call ``act`` with the arguments before each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*values: Any, **named: Any) -> Any:
        act(*values, **named)
        return original(*values, **named)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call ``act`` with the result and the arguments after each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*values: Any, **named: Any) -> Any:
        result = original(*values, **named)
        act(result, *values, **named)
        return result

    setattr(owner, name, wrapped)
