"""Reading a method's state back: its parts, and whether an array is what it has to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import State, StateError

__all__ = ["part", "require_array", "require_count"]


def part(prefix: str, state: State) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with ``prefix``, by what follows it."""
    return {n.removeprefix(prefix): array for n, array in state.items() if n.startswith(prefix)}


def require_array(
    array: NDArray[Any], name: str, dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    """Raises StateError, which calls the array ``name``, for another dtype or shape."""
    if array.dtype != dtype or array.shape != shape:
        raise StateError(
            f"the state's {name!r} is {array.dtype} {array.shape}; expected "
            f"{np.dtype(dtype)} {shape}"
        )


def require_count(array: NDArray[Any], name: str) -> int:
    """The number in an int64 scalar; raises StateError, which calls it ``name``, where there is
    none, or one below 0."""
    if array.dtype != np.int64 or array.shape != () or array < 0:
        raise StateError(f"the state's {name!r} is no count")
    return int(array)
