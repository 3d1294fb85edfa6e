"""Shapes whose lengths may be names: `("items", "k")` is fixed only once the axes have sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from device_sdk.artifact.errors import ArtifactError

Dim = int | str | None
Shape = tuple[Dim, ...]

MAX_RANK = 16
MAX_ELEMENTS = 2**40
"""No tensor of an artifact may have more elements than this."""


def checked_shape(shape: object, where: str, *, unknown: bool = False) -> Shape:
    """The shape as a tuple of positive integers, names of axes and (if `unknown`) None."""
    if not isinstance(shape, (tuple, list)) or len(shape) > MAX_RANK:
        raise ArtifactError(f"{where}: a shape is a list of at most {MAX_RANK} lengths")
    for dim in shape:
        if isinstance(dim, str) or (dim is None and unknown):
            continue
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ArtifactError(
                f"{where}: {dim!r} is no length: expected a positive integer or the name of an axis"
            )
    known = tuple(dim for dim in shape if isinstance(dim, int))
    if math.prod(known) > MAX_ELEMENTS:
        raise ArtifactError(f"{where}: shape {list(shape)} has more than {MAX_ELEMENTS} elements")
    return tuple(shape)


def axes_of(shape: Shape) -> tuple[str, ...]:
    """Names of the shape's free axes, in order."""
    return tuple(dim for dim in shape if isinstance(dim, str))


def resolve(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with every named axis replaced by its size. Raises KeyError for an unknown name."""
    return tuple(sizes[dim] if isinstance(dim, str) else _length(dim) for dim in shape)


def _length(dim: int | None) -> int:
    if dim is None:
        raise ValueError("a shape with an unknown length cannot be resolved")
    return dim


def describe(shape: Shape) -> str:
    """The shape as a person would write it: `[batch, 1, 28]`; `?` where only the graph knows."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"
