"""How a task file's settings become a method: one file for each method.

A new method adds its file here and its name to ``BINDINGS``. A method's arithmetic is imported
when a task names it: attention's clustering needs libraries that other tasks do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aggregator.bindings.binding import Binding
from aggregator.bindings.fedavg import read_fedavg
from aggregator.bindings.scatter import ScatterBinding
from aggregator.toml_table import TomlTable

__all__ = ["BINDINGS", "Binding"]


def _attention(table: TomlTable) -> Binding:
    from aggregator.bindings.attention import read_attention

    return read_attention(table)


def _mutual(table: TomlTable) -> Binding:
    from aggregator.bindings.mutual import read_mutual

    return read_mutual(table)


def _teacher_logits(table: TomlTable) -> Binding:
    from aggregator.bindings.teacher_logits import read_teacher_logits

    return read_teacher_logits(table)


BINDINGS: Mapping[str, Callable[[TomlTable], Binding]] = {
    "attention": _attention,
    "fedavg": read_fedavg,
    "mutual": _mutual,
    "scatter": ScatterBinding.read,
    "teacher_logits": _teacher_logits,
}
"""By method's name, what reads the table of that name in a task file."""
