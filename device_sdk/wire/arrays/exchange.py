"""The only two data messages: a broadcast to many devices, an update from one device.

What only some devices want, or want once, is attached to a broadcast and fetched apart.

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

_FLOATS, _WHOLES = ("float32", "float16"), ("int64", "int32", "int16", "int8", "uint8", "uint16")
_DTYPE_NAMES = (*_FLOATS, *_WHOLES, "bool")
# Compared as objects: a dtype's name is worked out anew each time it is asked for, and every update
# passes here.
_DTYPES = frozenset(np.dtype(name) for name in _DTYPE_NAMES)
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")

_SENDER = re.compile(r"([0-9a-f]{32})?")

Scalar = bool | int | float | str
_NONE: Mapping[str, Scalar] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """Named arrays that travel apart from a broadcast, to those who want them.

    ``cohort`` names who may read it: "" is every device of the task. Named by what it holds on the
    wire, so one that did not change is not fetched again. Raises as :class:`Broadcast` does.
    """

    tensors: Mapping[str, NDArray[Any]]
    cohort: str = ""

    def __post_init__(self) -> None:
        if self.cohort:
            _require_name(self.cohort)
        object.__setattr__(self, "tensors", _read_only(self.tensors))


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """What the aggregator tells a whole cohort at the start of a round.

    ``round_id`` (from 1) names the round, ``version`` (from 0) the model's state in ``tensors``; a
    round that changed nothing is followed by one with the same version. ``settings`` are the
    task's training settings, the same for every device.

    ``attachments``, by name: with the aggregator all of them, on a device those that its learner
    wanted. ``cohorts`` is for the aggregator only: by a cohort's name, the senders that may read
    its attachments. ``offered`` is for devices only: by name, the bytes of each attachment that
    this one may fetch.

    Raises ValueError for negative numbers, bad names, a dtype outside the closed list or a number
    that is not finite, TypeError for a setting that is no scalar. Arrays are kept as read-only
    views, not copied.
    """

    round_id: int
    version: int
    tensors: Mapping[str, NDArray[Any]]
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
    cohorts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offered: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_count("round_id", self.round_id)
        _require_count("version", self.version)
        object.__setattr__(self, "tensors", _read_only(self.tensors))
        object.__setattr__(self, "settings", _scalars(self.settings))
        for name in (*self.attachments, *self.cohorts, *self.offered):
            _require_name(name)
        for senders in self.cohorts.values():
            for sender in senders:
                _require_sender(sender)
        for name, attachment in self.attachments.items():
            if attachment.cohort and self.cohorts and attachment.cohort not in self.cohorts:
                raise ValueError(f"attachment {name!r} is for {attachment.cohort!r}, no cohort")
        for what in ("attachments", "cohorts", "offered"):
            object.__setattr__(self, what, MappingProxyType(dict(getattr(self, what))))


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one device contributes to the round ``round_id``: arrays and a little metadata.

    ``sender``: who, in 32 hexadecimal digits. The aggregator fills it in from the session, never
    from the body; "" where nobody needs to know.

    Raises as :class:`Broadcast` does. Whether the arrays make sense to a method is the
    method's ``check``.
    """

    round_id: int
    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    sender: str = ""

    def __post_init__(self) -> None:
        _require_count("round_id", self.round_id)
        _require_sender(self.sender)
        object.__setattr__(self, "tensors", _read_only(self.tensors))
        object.__setattr__(self, "metadata", _scalars(self.metadata))


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 0")


def _require_sender(sender: object) -> None:
    if sender == "":
        return
    if not isinstance(sender, str) or not _SENDER.fullmatch(sender):
        raise ValueError(f"{sender!r} is no sender; expected 32 hexadecimal digits")


# Every update repeats the same few names.
@functools.lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not _is_name(name):
        raise ValueError(
            f"{name!r} is no name for a tensor or setting; expected lower-case words such as "
            "'items' or 'items.weight'"
        )


@functools.lru_cache(maxsize=64)
def _require_names(names: tuple[object, ...]) -> None:
    for name in names:
        _require_name(name)


def _read_only(tensors: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    _require_names(tuple(tensors))  # the same few every time
    frozen: dict[str, NDArray[Any]] = {}
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(
                f"tensor {name!r} is {found}; expected a numpy array of one of "
                f"{', '.join(_DTYPE_NAMES)}"
            )
        view = array.view()
        # Learners of one process share a broadcast: one that wrote into it would change the others.
        view.setflags(write=False)
        frozen[name] = view
    return MappingProxyType(frozen)


def _scalars(values: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    if not values:
        return _NONE
    for name, value in values.items():
        _require_name(name)
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; expected a bool, int, float or str"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name!r} is {value}; expected a finite number")
    return MappingProxyType(dict(values))
