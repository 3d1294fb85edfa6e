"""How a task file's settings become a method: one file for each method.

A new method adds its file here and its name to ``BINDINGS``. A method's arithmetic is imported
when a task names it: attention's clustering needs libraries that other tasks do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aggregator.methods.binding import Binding
from aggregator.methods.fedavg.binding import read_fedavg
from aggregator.methods.scatter.binding import ScatterBinding
from aggregator.tables import TomlTable

__all__ = ["BINDINGS", "Binding"]


def _attention(table: TomlTable) -> Binding:
    from aggregator.methods.attention.binding import read_attention

    return read_attention(table)


def _mutual(table: TomlTable) -> Binding:
    from aggregator.methods.mutual.binding import read_mutual

    return read_mutual(table)


def _teacher_logits(table: TomlTable) -> Binding:
    from aggregator.methods.teacher_logits.binding import read_teacher_logits

    return read_teacher_logits(table)


BINDINGS: Mapping[str, Callable[[TomlTable], Binding]] = {
    "attention": _attention,
    "fedavg": read_fedavg,
    "mutual": _mutual,
    "scatter": ScatterBinding.read,
    "teacher_logits": _teacher_logits,
}
"""By method's name, what reads the table of that name in a task file."""
