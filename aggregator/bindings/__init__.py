"""How a task file's settings become a method: one file for each method.

A new method adds its file here and its name to ``BINDINGS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aggregator.bindings.binding import Binding
from aggregator.bindings.scatter import ScatterBinding
from aggregator.toml_table import TomlTable

__all__ = ["BINDINGS", "Binding"]

BINDINGS: Mapping[str, Callable[[TomlTable], Binding]] = {"scatter": ScatterBinding.read}
"""By method's name, what reads the table of that name in a task file."""
