"""State tensors: what crosses the session's boundary at each step, and what is packed inside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.names import checked_name
from device_sdk.artifact.shapes import Shape, axes_of, checked_shape

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
    fixed axes (a history of gradients, say), and None means a fixed shape of its own.
    """

    name: str
    kind: str
    dtype: str
    shape: Shape
    members: tuple[Member, ...] = ()
    like: str | None = None

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
