"""What a manifest says of state tensors and of graphs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.shapes import (
    DTYPES,
    Shape,
    axes_of,
    checked_file_name,
    checked_name,
    checked_shape,
)

AVERAGE_LAG = "average_lag"
"""Kind of optimizer state that a parameter's moving average is told by: the average less it."""

# State tensors: what crosses the session's boundary at each step, and what is packed inside.

KINDS = ("parameter", "buffer", "optimizer", "counter")


@dataclass(frozen=True)
class Member:
    """A torch parameter or buffer inside a state tensor.

    `offset` counts elements from the start of the flattened state tensor.
    """

    name: str
    shape: Shape
    offset: int = 0

    def __post_init__(self) -> None:
        checked_name(self.name, "member")
        object.__setattr__(self, "shape", checked_shape(self.shape, f"member {self.name!r}"))
        if not isinstance(self.offset, int) or isinstance(self.offset, bool) or self.offset < 0:
            raise ArtifactError(
                f"member {self.name!r}: offset {self.offset!r} is no count of elements"
            )


@dataclass(frozen=True)
class StateTensor:
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

    name: str
    kind: str
    dtype: str
    shape: Shape
    members: tuple[Member, ...] = ()
    like: str | None = None
    frozen: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        checked_name(self.name, "state tensor")
        where = f"state tensor {self.name!r}"
        if self.kind not in KINDS:
            raise ArtifactError(f"{where}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.dtype not in DTYPES:
            raise ArtifactError(f"{where}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        object.__setattr__(self, "shape", checked_shape(self.shape, where))
        object.__setattr__(self, "members", tuple(self.members))
        if self.kind in ("parameter", "buffer"):
            if not self.members or self.like is not None:
                raise ArtifactError(f"{where}: a {self.kind} lists its members and is like nothing")
            self._check_members(where)
        elif self.members:
            raise ArtifactError(f"{where}: only parameters and buffers have members")
        if not isinstance(self.frozen, bool) or (self.frozen and self.kind != "buffer"):
            raise ArtifactError(f"{where}: frozen is true of buffers only")
        if not isinstance(self.in_place, bool) or (
            self.in_place and self.kind not in ("parameter", "optimizer")
        ):
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
class Port:
    """An input or output of a graph.

    `name` is its name in the ONNX graph, `of` what the user calls it (the batch entry's key, the
    state tensor, the hyper-parameter). `default` belongs to hyper-parameters only.
    """

    name: str
    role: str
    of: str
    dtype: str
    shape: Shape
    default: float | None = None

    def __post_init__(self) -> None:
        checked_name(self.name, "graph input or output")
        where = f"graph input or output {self.name!r}"
        if self.role not in INPUT_ROLES + OUTPUT_ROLES:
            raise ArtifactError(f"{where}: role {self.role!r} is unknown")
        checked_name(self.of, where)
        if self.dtype not in DTYPES:
            raise ArtifactError(f"{where}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        shape = checked_shape(self.shape, where, unknown=self.role == "output")
        object.__setattr__(self, "shape", shape)
        wanted = _SCALARS.get(self.role)
        if wanted is not None and (self.dtype, self.shape) != (wanted, ()):
            raise ArtifactError(f"{where}: a {self.role} is a {wanted} scalar")
        if self.role == "hyper":
            if (
                isinstance(self.default, bool)
                or not isinstance(self.default, (int, float))
                or not math.isfinite(self.default)
            ):
                raise ArtifactError(f"{where}: a hyper-parameter needs a finite number as default")
            object.__setattr__(self, "default", float(self.default))
        elif self.default is not None:
            raise ArtifactError(f"{where}: only hyper-parameters have a default")


@dataclass(frozen=True)
class GraphFile:
    """An ONNX file of the artifact and its signature."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __post_init__(self) -> None:
        checked_file_name(self.file)
        for side, roles in (("inputs", INPUT_ROLES), ("outputs", OUTPUT_ROLES)):
            ports = tuple(getattr(self, side))
            object.__setattr__(self, side, ports)
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
class MetricSource:
    """What a metric (``device_sdk/evaluation/metrics.py``) compares.

    Attributes:
        output: an output in evaluation mode; None for the loss, which is about itself.
        target: the batch entry that says what is right.
        scale: of a classifier's output: ``logits`` or ``probabilities``; None of numbers.
    """

    output: str | None = None
    target: str | None = None
    scale: str | None = None

    def __post_init__(self) -> None:
        for what in ("output", "target", "scale"):
            name = getattr(self, what)
            if name is not None:
                checked_name(name, f"a metric's {what}")
        if (self.output is None) != (self.target is None) or (self.scale and not self.output):
            raise ArtifactError("a metric is about an output and a target, or about the loss")
        if self.scale not in (None, "logits", "probabilities"):
            raise ArtifactError(f"scale {self.scale!r} is neither logits nor probabilities")
