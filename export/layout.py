"""How parameters and buffers are laid out as state tensors: small ones packed, the rest alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from export.axes import Axes, Shape
from export.errors import ExportError

PACK_LIMIT = 65_536
"""Parameters of at most this many elements share one vector (see docs/architecture/export.md)."""

# Names of state tensors that hold several values; a parameter of such a name needs another.
_RESERVED = ("packed", "buffers", "kept", "frozen", "step")


@dataclass(frozen=True)
class LayoutMember:
    """One parameter or buffer inside a state tensor."""

    name: str
    shape: Shape
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements; only for fixed shapes."""
        return count(self.shape)


@dataclass(frozen=True)
class LayoutSlot:
    """One state tensor that holds parameters or buffers."""

    name: str
    kind: str  # "parameter" or "buffer"
    dtype: torch.dtype
    shape: Shape
    members: tuple[LayoutMember, ...]
    packed: bool
    kept: bool = False
    """Whether a step leaves it as it is: then it is no output of the train graph."""
    frozen: bool = False
    """Whether it is kept because its parameters are not trained: a device makes it constants."""

    def unpack(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """The members' values out of the state tensor, or out of state of its shape behind leading
        axes."""
        if not self.packed:
            return {self.members[0].name: state}
        lead = state.shape[:-1]
        parts = torch.split(state, [member.elements for member in self.members], len(lead))
        return {
            member.name: part.reshape([*lead, *(int(size) for size in member.shape)])
            for member, part in zip(self.members, parts, strict=True)
        }

    def pack(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The state tensor out of the members' values, each maybe behind leading axes."""
        if not self.packed:
            return values[self.members[0].name]
        first = self.members[0]
        lead = values[first.name].shape[: values[first.name].dim() - len(first.shape)]
        flat = [values[member.name].reshape([*lead, -1]) for member in self.members]
        return flat[0] if len(flat) == 1 else torch.cat(flat, len(lead))


def count(shape: Shape) -> int:
    """Number of elements of a fixed shape."""
    total = 1
    for size in shape:
        if isinstance(size, str):
            raise ValueError(f"{shape} has a named axis")
        total *= size
    return total


def lay_out(
    parameters: Mapping[str, torch.Tensor], axes: Axes, packs: Mapping[str, str]
) -> tuple[LayoutSlot, ...]:
    """Slots for all parameters, in the model's order.

    ``packs``: by a parameter's name, which pack it may share with others, "" for the usual one.
    """
    for name, tensor in parameters.items():
        if tensor.dtype != torch.float32:
            raise ExportError(f"parameter {name!r} is {tensor.dtype}", instead="float32 parameters")
    slots: list[LayoutSlot] = []
    for pack in sorted(set(packs.values())):
        chosen = {name: value for name, value in parameters.items() if packs[name] == pack}
        label = f"packed.{pack}" if pack else "packed"
        slots.extend(_slots("parameter", label, chosen, axes))
    return tuple(slots)


def lay_out_buffers(
    buffers: Mapping[str, torch.Tensor],
    axes: Axes,
    kept: Collection[str],
    frozen: Collection[str],
    held: Collection[str] = (),
) -> tuple[LayoutSlot, ...]:
    """Slots for all buffers, parameters that are not trained among them.

    ``kept``: those that a step leaves as they are; ``frozen``: parameters that are not trained,
    and what stands beside such parameters only; ``held``: of both what changes between rounds.
    """

    def label_of(name: str) -> str:
        if name not in kept:
            return "buffers"
        return "held" if name in held else "frozen" if name in frozen else "kept"

    groups: dict[tuple[str, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, value in buffers.items():
        groups.setdefault((label_of(name), value.dtype), {})[name] = value
    slots: list[LayoutSlot] = []
    for (label, dtype), chosen in groups.items():
        typed = label if dtype == torch.float32 else f"{label}.{str(dtype)[6:]}"
        slots += [
            replace(slot, kept=label != "buffers", frozen=label == "frozen")
            for slot in _slots("buffer", typed, chosen, axes)
        ]
    return tuple(slots)


def _slots(
    kind: str, label: str, tensors: Mapping[str, torch.Tensor], axes: Axes
) -> Sequence[LayoutSlot]:
    members: list[LayoutMember] = []
    alone: list[LayoutSlot] = []
    offset = 0
    dtype = torch.float32
    for name, tensor in tensors.items():
        shape = axes.shape(f"state.{name}", tensor.shape)
        dtype = tensor.dtype
        named = any(isinstance(size, str) for size in shape)
        if named or tensor.numel() > PACK_LIMIT:
            member = LayoutMember(name, shape, 0)
            own = f"{name}.alone" if name.split(".")[0] in _RESERVED else name
            alone.append(LayoutSlot(own, kind, dtype, shape, (member,), packed=False))
        elif tensor.numel() > 0:
            members.append(LayoutMember(name, shape, offset))
            offset += tensor.numel()
    packed = (
        [LayoutSlot(label, kind, dtype, (offset,), tuple(members), packed=True)] if members else []
    )
    return [*packed, *alone]
