"""What every kind of pooling asks of its windows: sizes along the axes, and a batch axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export.errors import ExportError
from export.lowering.graph import Dim, Graph, Value, fixed


def along_axes(values: Sequence[int], rank: int, default: Sequence[int] = ()) -> list[int]:
    """One number an axis, of a single one for all, of all, or of none (then ``default``)."""
    listed = [int(value) for value in values] or list(default)
    return listed * rank if len(listed) == 1 else listed


def fixed_sizes(sizes: Sequence[Dim], operator: str) -> list[int]:
    """The sizes as numbers. Raises ExportError where one depends on a named axis."""
    numbers = [fixed(size) for size in sizes]
    if any(number is None for number in numbers):
        raise ExportError(
            "pooling over an axis that is named as dynamic",
            operator=operator,
            instead="fixed spatial sizes, or a mean or maximum over the whole axis",
        )
    return [number for number in numbers if number is not None]


def with_batch(g: Graph, x: Value, rank: int) -> Value:
    """The value with a batch axis, which torch allows to be absent and ONNX does not."""
    if x.rank == rank + 2:
        return x
    return Value(g.op("Unsqueeze", x, g.ints([0])), x.dtype, (1, *x.shape))


def even_window(x: Value, out: Any, rank: int) -> list[int] | None:
    """The window where the output divides the input evenly, else None."""
    sizes = fixed_sizes(x.shape[-rank:], "aten.adaptive_pool")
    wanted = fixed_sizes(out.shape[-rank:], "aten.adaptive_pool")
    if any(size % want for size, want in zip(sizes, wanted, strict=True)):
        return None
    return [size // want for size, want in zip(sizes, wanted, strict=True)]
