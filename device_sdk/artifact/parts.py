"""What a manifest says of state tensors and of graphs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from device_sdk.artifact.errors import ArtifactError, ArtifactMisfit
from device_sdk.fields import As, Declared, Length, OneOf, Such, Within

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


def is_under(name: str, prefixes: Collection[str]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one: ``head`` holds ``head.w``."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


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


class Part(Declared):
    """A part of a manifest. Raises ArtifactError where it is not what its fields' types say."""

    misfit = ArtifactMisfit


AVERAGE_LAG = "average_lag"
"""Kind of optimizer state that a parameter's moving average is told by: the average less it."""
RATE_BY_TRIAL = "rate_by_trial"
"""Setting of an optimizer whose author left the rate to a trial."""

# State tensors: what crosses the session's boundary at each step, and what is packed inside.

KINDS = ("parameter", "buffer", "optimizer", "counter")


@dataclass(frozen=True)
class Member(Part):
    """A torch parameter or buffer inside a state tensor.

    `offset` counts elements from the start of the flattened state tensor.
    """

    name: Name
    shape: KnownShape
    offset: Annotated[int, Within(0)]


@dataclass(frozen=True)
class StateTensor(Part):
    """One tensor of a train step's state.

    Parameters and buffers list their members: either several of fixed shape packed into a flat
    vector, or exactly one with the tensor's own shape, which may then have named axes. Optimizer
    state starts at zero; `like` names the state tensor whose shape it follows, after any leading
    fixed axes (a history of gradients, say), and None means a fixed shape of its own. `frozen`
    buffers hold parameters that are not trained: no step changes them, and others seldom do, so
    that a device may make them constants of its sessions. `in_place`: the train graph reads the
    old value only before it writes the new one, and writes only where the step is whole, so that
    both may be the same memory.
    """

    name: Name
    kind: Annotated[str, OneOf(KINDS)]
    dtype: Dtype
    shape: KnownShape
    members: tuple[Member, ...] = ()
    like: str | None = None
    frozen: bool = False
    in_place: bool = False

    def check(self) -> None:
        where = f"state tensor {self.name!r}"
        if self.kind in ("parameter", "buffer"):
            if not self.members or self.like is not None:
                raise ArtifactError(f"{where}: a {self.kind} lists its members and is like nothing")
            self._check_members(where)
        elif self.members:
            raise ArtifactError(f"{where}: only parameters and buffers have members")
        if self.frozen and self.kind != "buffer":
            raise ArtifactError(f"{where}: frozen is true of buffers only")
        if self.in_place and self.kind not in ("parameter", "optimizer"):
            raise ArtifactError(f"{where}: in_place is true of parameters and optimizer state only")
        if self.kind == "counter" and (self.shape, self.dtype, self.like) != ((), "int64", None):
            raise ArtifactError(f"{where}: a counter is an int64 scalar")

    def _check_members(self, where: str) -> None:
        if axes_of(self.shape):
            only = self.members[0]
            if len(self.members) != 1 or only.shape != self.shape or only.offset != 0:
                raise ArtifactError(
                    f"{where} has a named axis, so it holds exactly one member of the same shape"
                )
            return
        end = 0
        for member in self.members:
            if axes_of(member.shape):
                raise ArtifactError(
                    f"{where}: member {member.name!r} has a named axis inside a pack"
                )
            if member.offset < end:
                raise ArtifactError(f"{where}: member {member.name!r} overlaps the one before it")
            end = member.offset + math.prod(d for d in member.shape if isinstance(d, int))
        total = math.prod(d for d in self.shape if isinstance(d, int))
        if end > total:
            raise ArtifactError(f"{where}: its members need {end} elements, it has {total}")


# The signature of one ONNX graph of an artifact: what each input and output is for.

INPUT_ROLES = ("state", "bounds", "batch", "hyper", "seed")
OUTPUT_ROLES = ("loss", "guard", "begun", "done", "bounds", "state", "output")
# Roles whose tensor is always the same scalar type.
_SCALARS = {
    **dict.fromkeys(("loss", "guard", "hyper"), "float32"),
    **dict.fromkeys(("begun", "done"), "bool"),
    "seed": "int64",
}


@dataclass(frozen=True)
class Port(Part):
    """An input or output of a graph.

    `name` is its name in the ONNX graph, `of` what the user calls it (the batch entry's key, the
    state tensor, the hyper-parameter). `default` belongs to hyper-parameters only.
    """

    name: Name
    role: Annotated[str, OneOf((*INPUT_ROLES, *OUTPUT_ROLES))]
    of: Name
    dtype: Dtype
    shape: Shape
    default: float | None = None

    def check(self) -> None:
        where = f"graph input or output {self.name!r}"
        if None in self.shape and self.role != "output":
            raise ArtifactError(f"{where}: only an output's shape has lengths that are unknown")
        wanted = _SCALARS.get(self.role)
        if wanted is not None and (self.dtype, self.shape) != (wanted, ()):
            raise ArtifactError(f"{where}: a {self.role} is a {wanted} scalar")
        if (self.role == "hyper") is (self.default is None):
            raise ArtifactError(f"{where}: hyper-parameters, and only they, have a default")


@dataclass(frozen=True)
class GraphFile(Part):
    """An ONNX file of the artifact and its signature."""

    file: FileName
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def check(self) -> None:
        sides = (("inputs", self.inputs, INPUT_ROLES), ("outputs", self.outputs, OUTPUT_ROLES))
        for side, ports, roles in sides:
            for port in ports:
                if port.role not in roles:
                    raise ArtifactError(
                        f"{self.file}: role {port.role!r} of {port.name!r} is not one of the "
                        f"{side}' roles ({', '.join(roles)})"
                    )
            _refuse_duplicates([port.name for port in ports], f"{self.file}: {side}")
            keys = [f"{port.role} {port.of}" for port in ports]
            _refuse_duplicates(keys, f"{self.file}: {side}")
        for role in _SCALARS.keys() - {"hyper"}:
            if len(self.select(role)) > 1:
                raise ArtifactError(f"{self.file}: more than one {role}")
        self._check_gate()

    def _check_gate(self) -> None:
        told, known = (
            [p for p in side if p.role == "bounds"] for side in (self.outputs, self.inputs)
        )
        parts = [*self.select("begun"), *self.select("done"), *told, *known]
        if not parts:
            return
        if [len(self.select("begun")), len(self.select("done")), len(told), len(known)] != [1] * 4:
            raise ArtifactError(f"{self.file}: begun, done and bounds in and out come together")
        (before,), (after,) = known, told
        same = (before.dtype, before.shape) == (after.dtype, after.shape)
        if not same or before.dtype != "float32" or len(before.shape) != 1 or axes_of(before.shape):
            raise ArtifactError(f"{self.file}: bounds are float32 vectors of one fixed length")

    @property
    def is_gated(self) -> bool:
        """Whether it says when it begins to write state, and when that is done."""
        return bool(self.select("done"))

    def select(self, role: str) -> tuple[Port, ...]:
        """The ports of a role, in order; for "state", the inputs (see `new_state` for outputs)."""
        ports = self.inputs if role in INPUT_ROLES else self.outputs
        return tuple(port for port in ports if port.role == role)

    @property
    def new_state(self) -> tuple[Port, ...]:
        """The outputs that are the next step's state."""
        return tuple(port for port in self.outputs if port.role == "state")


def _refuse_duplicates(names: list[str], where: str) -> None:
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)[:5]
        raise ArtifactError(f"{where}: {', '.join(twice)} given more than once")


# What of a graph's outputs and batch entries the metrics are about, by which a model is evaluated.


@dataclass(frozen=True)
class MetricSource(Part):
    """What a metric (``device_sdk/evaluation/metrics.py``) compares.

    Attributes:
        output: an output in evaluation mode; None for the loss, which is about itself.
        target: the batch entry that says what is right.
        scale: of a classifier's output: ``logits`` or ``probabilities``; None of numbers.
    """

    output: Name | None = None
    target: Name | None = None
    scale: Annotated[str, OneOf(("logits", "probabilities"))] | None = None

    def check(self) -> None:
        if (self.output is None) != (self.target is None) or (self.scale and not self.output):
            raise ArtifactError("a metric is about an output and a target, or about the loss")
