"""Names, dtypes and shapes as a manifest writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from device_sdk.artifact.errors import ArtifactError

# Rules for the names an artifact may carry.

MAX_NAME_LENGTH = 512
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
# Names that open a device instead of a file on Windows, whatever their extension.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z)", re.IGNORECASE)


def checked_name(name: object, what: str) -> str:
    """A non-empty printable string of at most MAX_NAME_LENGTH characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        shown = repr(name)[:80]
        raise ArtifactError(
            f"{what}: {shown} is no name: expected 1 to {MAX_NAME_LENGTH} printable characters"
        )
    return name


def checked_file_name(name: object) -> str:
    """A plain file name: no folder, no leading dot, ASCII letters, digits, '.', '-' and '_'."""
    if not isinstance(name, str) or not _FILE_NAME.match(name) or _RESERVED.match(name):
        raise ArtifactError(
            f"{repr(name)[:80]} is not allowed as a file name: an artifact's files lie directly in "
            "its folder and are named in ASCII letters, digits, '.', '-' and '_'"
        )
    return name


# Element types an artifact's tensors may have, by the names the manifest uses.

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(name)
    for name in (
        "float32",
        "float64",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}
"""Manifest name -> numpy dtype (native byte order)."""

ONNX_ELEMENT_TYPES: Final[dict[int, str]] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
}
"""onnx.TensorProto.DataType -> manifest name."""


# Shapes whose lengths may be names: `("items", "k")` is fixed only once the axes have sizes.

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
