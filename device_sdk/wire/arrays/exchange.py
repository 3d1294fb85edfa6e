"""The only two data messages: a broadcast to many devices, an update from one device.

What only some devices want, or want once, is attached to a broadcast and fetched apart.

Both are named arrays and a little metadata: a broadcast's are the settings of training, an update's
travel in its body. Nothing here knows of keys, topics, files or clocks, so a method runs the same
in a unit test, in the simulator and behind a broker.

An update's body, little-endian: ``1 | length of the metadata 2 | metadata | arrays``. The metadata
is a canonical CBOR map of scalars; the arrays are named arrays (``tensors.py``), to the last byte.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Such
from device_sdk.wire.arrays.tensors import (
    BeyondWire,
    Codec,
    TensorLimits,
    decode_tensors,
    encode_tensors,
)
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

_FLOATS, _WHOLES = ("float32", "float16"), ("int64", "int32", "int16", "int8", "uint8", "uint16")
_DTYPE_NAMES = (*_FLOATS, *_WHOLES, "bool")
# Compared as objects: a dtype's name is worked out anew each time it is asked for, and every update
# passes here.
_DTYPES = frozenset(np.dtype(name) for name in _DTYPE_NAMES)
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")

_SENDER = re.compile(r"([0-9a-f]{32})?")

TENSOR_NAME_WORDS = "lower-case words such as 'items' or 'items.weight'"


# Every update repeats the same few names.
@functools.lru_cache(maxsize=256)
def is_tensor_name(name: str) -> bool:
    """Whether it may name a tensor, a setting, an attachment or a cohort of these."""
    return _NAME.fullmatch(name) is not None


Scalar = bool | int | float | str
Scalars = Mapping[Annotated[str, Such(is_tensor_name, TENSOR_NAME_WORDS)], Scalar]
_NONE: Mapping[str, Scalar] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """Named arrays that travel apart from a broadcast, to those who want them.

    ``cohort`` names who may read it: "" is every device of the task. Named by what it holds on the
    wire, so one that did not change is not fetched again. ``exact`` names tensors that no codec
    rounds. ``lasting``: a part of the version itself, which stays when nobody trains. Raises as
    :class:`Broadcast` does.
    """

    tensors: Mapping[str, NDArray[Any]]
    cohort: str = ""
    exact: frozenset[str] = frozenset()
    lasting: bool = False

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
    this one may fetch. ``exact`` names tensors that no codec rounds.

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
    exact: frozenset[str] = frozenset()

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
    from the body; "" where nobody needs to know. ``exact`` names tensors that no codec rounds.
    ``age``: of a closed round, how many versions were made since the one that it was trained on;
    None of the open round. The aggregator's too.

    Raises as :class:`Broadcast` does. Whether the arrays make sense to a method is the
    method's ``check``.
    """

    round_id: int
    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    sender: str = ""
    exact: frozenset[str] = frozenset()
    age: int | None = None

    def __post_init__(self) -> None:
        _require_count("round_id", self.round_id)
        if self.sender != "":
            _require_sender(self.sender)
        if self.age is not None:
            _require_count("age", self.age)
        object.__setattr__(self, "tensors", _read_only(self.tensors))
        object.__setattr__(self, "metadata", _scalars(self.metadata))


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 0")


def _require_sender(sender: object) -> None:
    if not isinstance(sender, str) or not _SENDER.fullmatch(sender):
        raise ValueError(f"{sender!r} is no sender; expected 32 hexadecimal digits")


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not is_tensor_name(name):
        raise ValueError(
            f"{name!r} is no name for a tensor or setting; expected {TENSOR_NAME_WORDS}"
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
        if array.flags.writeable:
            # Learners of one process share a broadcast: one that wrote into it would change the
            # others.
            array = array.view()
            array.setflags(write=False)
        frozen[name] = array
    return MappingProxyType(frozen)


def _scalars(values: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    if not values:
        return _NONE
    _require_names(tuple(values))
    for name, value in values.items():
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"{name!r} is of type {type(value).__name__}; expected bool, int, float or str"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise BeyondWire(f"{name!r} is {value}; expected a finite number")
    return MappingProxyType(dict(values))


class TrainingSettings(Declared):
    """Base of the flat, frozen dataclasses that a broadcast carries beside its tensors."""

    __slots__ = ()

    LATER: ClassVar[frozenset[str]] = frozenset()
    """Settings that earlier aggregators do not tell, and then are the default."""

    def as_scalars(self) -> dict[str, Scalar]:
        """The settings as a broadcast carries them."""
        return dict(asdict(self))

    @classmethod
    def from_scalars(
        cls, values: Mapping[str, Scalar], error: Callable[[str], Exception] = ValueError
    ) -> Self:
        """Read a broadcast's settings; names of other parts are ignored.

        Raises ``error`` for missing names, and for values that the class refuses.
        """
        names = {each.name: each.default for each in fields(cls)}
        known = {**{name: names[name] for name in cls.LATER}, **values}
        missing = [name for name in names if name not in known]
        if missing:
            raise error(f"the broadcast lacks the training settings {', '.join(missing)}")
        try:
            return cast(Self, _made(cast(Any, cls), *[known[name] for name in names]))
        except ValueError as wrong:
            raise error(str(wrong)) from wrong


# Every device of a round reads the same ones. Typed, for 1 and True are equal, and one is refused.
@functools.lru_cache(maxsize=16, typed=True)
def _made(kind: Callable[..., Any], *values: Scalar) -> Any:
    return kind(*values)


MAX_METADATA_BYTES = 16 * 1024
UPDATE_LIMITS = TensorLimits(most_arrays=4096, most_bytes=256 << 20)
"""What the aggregator takes from one device in one round."""
_FORMAT = 1
_HEAD = struct.Struct("<BH")


def encode_update(update: Update, codec: Codec, rng: np.random.Generator | None = None) -> bytes:
    """The body of ``update``; ``round_id`` and ``sender`` travel apart from it.

    ``codec`` says how float32 arrays travel; ``rng`` is needed for ``Codec.INT8`` only. Raises
    ValueError for arrays that no codec carries and metadata above 16 KiB.
    """
    metadata = cbor.encode(dict(update.metadata))
    if len(metadata) > MAX_METADATA_BYTES:
        raise ValueError(f"the metadata take {len(metadata)} bytes; {MAX_METADATA_BYTES} fit")
    if len(update.tensors) > UPDATE_LIMITS.most_arrays:
        raise ValueError(f"{len(update.tensors)} arrays; {UPDATE_LIMITS.most_arrays} fit")
    arrays = encode_tensors(update.tensors, codec, rng, exact=update.exact)
    return _HEAD.pack(_FORMAT, len(metadata)) + metadata + arrays


def decode_update(body: bytes, round_id: int, sender: str = "") -> Update:
    """The update in ``body``, of the round and sender that its session and identity name.

    Pure and total. Raises ``WireError``: ``truncated``, ``bad-format``, ``bad-cbor``,
    ``bad-field``, or a reason of :func:`device_sdk.wire.arrays.tensors.decode_tensors`.
    """
    if len(body) < _HEAD.size:
        raise WireError("truncated", "no room for the head of an update")
    form, length = _HEAD.unpack_from(body)
    if form != _FORMAT:
        raise WireError("bad-format", f"format {form} of an update is unknown; expected {_FORMAT}")
    end = _HEAD.size + length
    if length > MAX_METADATA_BYTES or len(body) < end:
        raise WireError("truncated", "the update ends within its metadata")
    metadata: Any = cbor.decode(body[_HEAD.size : end], limit_bytes=MAX_METADATA_BYTES)
    if not isinstance(metadata, dict):
        raise WireError("bad-field", "the metadata must be a map")
    tensors = decode_tensors(body[end:], limits=UPDATE_LIMITS)
    try:
        return Update(round_id, tensors, metadata, sender)
    except (TypeError, ValueError) as error:
        raise WireError("bad-field", "the update's metadata or arrays are not usable") from error
