"""The only two data messages: a broadcast to many devices, an update from one device.

Both are named arrays and a little metadata. Nothing here knows of keys, topics, files or clocks,
so a method runs the same in a unit test, in the simulator and behind a broker.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Broadcast", "Scalar", "Update"]

_FLOATS, _WHOLES = ("float32", "float16"), ("int64", "int32", "int16", "int8", "uint8", "uint16")
_DTYPE_NAMES = (*_FLOATS, *_WHOLES, "bool")
# Compared as objects: a dtype's name is worked out anew each time it is asked for, and every update
# passes here.
_DTYPES = frozenset(np.dtype(name) for name in _DTYPE_NAMES)
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """What the aggregator tells a whole cohort at the start of a round.

    ``round_id`` (from 1) names the round, ``version`` (from 0) the model's state in ``tensors``; a
    round that changed nothing is followed by one with the same version. ``settings`` are the
    task's training settings, the same for every device.

    Raises ValueError for negative numbers, bad names, a dtype outside the closed list or a number
    that is not finite, TypeError for a setting that is no scalar. Arrays are kept as read-only
    views, not copied.
    """

    round_id: int
    version: int
    tensors: Mapping[str, NDArray[Any]]
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_count("round_id", self.round_id)
        _require_count("version", self.version)
        object.__setattr__(self, "tensors", _read_only(self.tensors))
        object.__setattr__(self, "settings", _scalars(self.settings))


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one device contributes to the round ``round_id``: arrays and a little metadata.

    Raises as :class:`Broadcast` does. Whether the arrays make sense to a method is the
    method's ``check``.
    """

    round_id: int
    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_count("round_id", self.round_id)
        object.__setattr__(self, "tensors", _read_only(self.tensors))
        object.__setattr__(self, "metadata", _scalars(self.metadata))


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 0")


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a tensor or setting; expected lower-case words such as "
            "'items' or 'items.weight'"
        )


@functools.lru_cache(maxsize=64)
def _is_allowed(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _DTYPES  # numpy makes the name anew each time


def _read_only(tensors: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    frozen: dict[str, NDArray[Any]] = {}
    for name, array in tensors.items():
        _require_name(name)
        if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(
                f"tensor {name!r} is {found}; expected a numpy array of one of "
                f"{', '.join(_DTYPE_NAMES)}"
            )
        view = array.view()
        # Learners of one process share a broadcast: one that wrote into it would change the others.
        view.flags.writeable = False
        frozen[name] = view
    return MappingProxyType(frozen)


def _scalars(values: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    for name, value in values.items():
        _require_name(name)
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; expected a bool, int, float or str"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name!r} is {value}; expected a finite number")
    return MappingProxyType(dict(values))
