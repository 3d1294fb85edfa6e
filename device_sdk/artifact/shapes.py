"""Names, dtypes and shapes as a manifest writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Final

import numpy as np

from device_sdk.fields import As, Length, OneOf, Such, Within

# Rules for the names an artifact may carry.

MAX_NAME_LENGTH = 512
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
# Names that open a device instead of a file on Windows, whatever their extension.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z)", re.IGNORECASE)


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_LENGTH and name.isprintable() and name != ""


def is_file_name(name: str) -> bool:
    """Whether it is a plain file name: no folder, no leading dot, none that Windows keeps."""
    return _FILE_NAME.match(name) is not None and _RESERVED.match(name) is None


Name = Annotated[str, Such(_is_name, f"a name of 1 to {MAX_NAME_LENGTH} printable characters")]
FileName = Annotated[
    str,
    Such(
        is_file_name,
        "a file name: an artifact's files lie directly in its folder and are named in ASCII "
        "letters, digits, '.', '-' and '_'",
    ),
]


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
Dtype = Annotated[str, OneOf(tuple(DTYPES))]

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

Dim = Annotated[int, Within(1)] | str | None

MAX_RANK = 16
MAX_ELEMENTS = 2**40
"""No tensor of an artifact may have more elements than this."""


def _is_small(shape: tuple[Dim, ...]) -> bool:
    return math.prod(dim for dim in shape if isinstance(dim, int)) <= MAX_ELEMENTS


Shape = Annotated[
    tuple[Dim, ...],
    Length(0, MAX_RANK),
    Such(_is_small, f"a shape of at most {MAX_ELEMENTS:,} elements"),
]
"""Positive lengths, names of axes, and None where only the graph knows."""
KnownShape = Annotated[Shape, As(tuple[Annotated[int, Within(1)] | str, ...])]


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
