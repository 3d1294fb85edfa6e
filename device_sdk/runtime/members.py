"""Parameters and buffers by torch's names: where they lie inside state tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.shapes import Shape, axes_of, describe, resolve
from device_sdk.artifact.state import Member, StateTensor
from device_sdk.errors import StateError


def check_tensor(what: str, array: object, dtype: str, rank: int) -> None:
    """Refuse what is no numpy array of the dtype and rank."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise StateError(f"{what} is a {type(array).__name__}, expected a numpy array")
    if array.dtype != DTYPES[dtype]:
        raise StateError(
            f"{what} is {array.dtype}, expected {dtype}. To fix it, convert it with "
            f".astype(np.{dtype})"
        )
    if array.ndim != rank:
        raise StateError(f"{what} has {array.ndim} axes, expected {rank}")


def new_sizes(
    axes: Mapping[str, int], given: Mapping[str, tuple[Shape, tuple[int, ...]]]
) -> dict[str, int]:
    """Sizes of the state's axes once tensors of the given (declared, actual) shapes are set.

    `axes` holds the present sizes. Raises StateError where the given tensors disagree with each
    other or with a fixed length.
    """
    sizes = dict(axes)
    origin: dict[str, str] = {}
    for name, (declared, actual) in given.items():
        for wanted, length in zip(declared, actual, strict=True):
            if isinstance(wanted, str) and length > 0:
                if wanted in origin and sizes[wanted] != length:
                    raise StateError(
                        f"{name!r} has {length} along axis {wanted!r}, but {origin[wanted]!r} has "
                        f"{sizes[wanted]}: tensors that share an axis must agree"
                    )
                sizes[wanted] = length
                origin[wanted] = name
            elif wanted != length:
                raise StateError(
                    f"{name!r} has shape {list(actual)}, expected {describe(declared)} with no "
                    "empty axis"
                )
    return sizes


class Members:
    """Where each parameter and buffer lies."""

    def __init__(self, manifest: Manifest) -> None:
        self._places: Final[dict[str, tuple[StateTensor, Member]]] = {
            member.name: (tensor, member) for tensor, member in manifest.members()
        }

    def place(self, name: str) -> tuple[StateTensor, Member]:
        """The state tensor that holds a parameter or buffer, and its place in it."""
        try:
            return self._places[name]
        except KeyError:
            known = ", ".join(sorted(self._places))
            raise StateError(
                f"{name!r} is no parameter or buffer here; known are {known}"
            ) from None

    def of_kind(self, kind: str) -> list[str]:
        """Names of all parameters, or of all buffers, in order."""
        return [name for name, (tensor, _) in self._places.items() if tensor.kind == kind]

    def extract(self, name: str, state: Array) -> Array:
        """A copy of the parameter or buffer, out of its state tensor's contents."""
        _, member = self._places[name]
        if axes_of(member.shape):
            return state.copy()
        return packed_view(state, member).copy()


def initial_state(manifest: Manifest, initial: Mapping[str, Array]) -> dict[str, Array]:
    """All state tensors at the start: parameters and buffers as given by name, the rest zero."""
    sizes = manifest.example_sizes
    state = {}
    for tensor in manifest.state:
        whole: Array = np.zeros(resolve(tensor.shape, sizes), DTYPES[tensor.dtype])
        for member in tensor.members:
            if axes_of(member.shape):
                whole = initial[member.name]
            else:
                packed_view(whole, member)[...] = initial[member.name]
        state[tensor.name] = whole
    return state


def packed_view(state: Array, member: Member) -> Array:
    """The member's elements inside a contiguous state tensor, as a view of the member's shape."""
    shape = resolve(member.shape, {})
    begin = member.offset
    view: Array = state.reshape(-1)[begin : begin + math.prod(shape)].reshape(shape)
    return view
