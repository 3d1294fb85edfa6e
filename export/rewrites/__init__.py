"""Equals of the few torch functions that cannot be recorded as they are.

Each file ends with what it stands for: ``EQUALS``, functions of C++ and methods of tensors, which
no patched module would reach everywhere, and ``REPLACED``, attributes of modules and classes.
``patch`` puts both in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Equals = dict[Any, Callable[..., Any]]
"""By torch's own function, what is called in its place."""

Replacement = tuple[Any, str, Any]
"""Owner and name of an attribute, and what it is set to."""
