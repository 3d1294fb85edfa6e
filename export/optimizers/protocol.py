"""What an optimizer is: a pure function on tensors, with declared state; and how it gets them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch

from export.axes import Shape
from export.errors import SettingError
from export.layout import LayoutMember, LayoutSlot

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class StateSpec:
    """One kind of optimizer state.

    With ``per_parameter`` there is one tensor for each parameter state tensor, of its shape behind
    the ``lead`` axes (a history of q gradients has lead (q,)); without, one tensor of shape
    ``lead``. All start at zero. ``guarded=False`` leaves it out of the check for NaN and infinity;
    right only where a non-finite value in it always makes the new parameters non-finite too.
    ``of`` are the positions of the parameter state tensors that it is kept for; None for all.
    """

    name: str
    per_parameter: bool = True
    lead: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    guarded: bool = True
    of: tuple[int, ...] | None = None


@dataclass(frozen=True)
class OptimizerUpdate:
    """What one step gives: new parameters, and new state in the same layout as it came."""

    parameters: list[torch.Tensor]
    state: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Optimizer(Protocol):
    """An optimizer that can be part of a train-step graph.

    ``update`` is traced once with torch operations on whole state tensors: ``parameters`` and
    ``gradients`` are equally long lists of float32 tensors of equal shapes (small parameters
    packed into one flat vector); ``state[name]`` has one tensor a parameter, or a single one for
    shared state; ``step`` is the int64 scalar count of finished steps; ``hyper`` maps run-time
    inputs to float32 scalars.

    More is asked for by those that need it. ``per_tensor = True``: the lists then hold
    single parameters in their own shapes, and so does the state. ``bound(slots)``: called once
    before the export with what the tensors of those lists hold (``export.layout.LayoutSlot``: name,
    shape, members), returns the optimizer that is exported; ValueError for what it cannot train.
    ``turns()``: counts of finished steps at which it does something new, for verification.
    """

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, object]:
        """Fixed settings, for the manifest (JSON values)."""
        ...

    def hyper(self) -> dict[str, float]:
        """Run-time inputs and their defaults; the learning rate is always one."""
        ...

    def state(self) -> tuple[StateSpec, ...]:
        """The state it keeps."""
        ...

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        """One step."""
        ...


def require(condition: bool, message: str) -> None:
    """Refuse a setting."""
    if not condition:
        raise SettingError(message)


def require_rate(lr: float, weight_decay: float = 0.0) -> None:
    """Refuse a learning rate or a decay that is no number, or below 0."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(number, f"{name} is {value!r}; expected a number")
        require(value != math.inf, f"{name} is {value}; it must be finite")
    require(lr >= 0, f"lr is {lr}; it must be at least 0")
    require(weight_decay >= 0, f"weight_decay is {weight_decay}; at least 0")


class Described:
    """Names itself, and its fields: the run-time ``inputs``, and the settings, all others."""

    inputs: ClassVar[tuple[str, ...]] = ("lr",)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def settings(self) -> dict[str, object]:
        values = {key: value for key, value in vars(self).items() if key not in self.inputs}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def hyper(self) -> dict[str, float]:
        return {key: vars(self)[key] for key in self.inputs}

    def with_settings(self, changes: Mapping[str, object]) -> Self:
        """The same with some other settings; SettingError for one that it has not."""
        refuse_unknown(type(self).__name__, changes, vars(self))
        return replace(self, **changes)  # type: ignore[type-var]


def refuse_unknown(name: str, changes: Collection[str], known: Collection[str]) -> None:
    """Refuse a setting that an optimizer of this name has not."""
    odd = sorted(set(changes) - set(known))
    require(
        not odd,
        f"a group sets {', '.join(odd)}, which {name} has not; it has {', '.join(known)}: give the "
        "group an optimizer of its own",
    )


# How an optimizer gets what it asks for.


def turns(optimizer: object) -> set[int]:
    """Counts of finished steps at which an optimizer or a schedule does something else than before.

    Verification, which trains a few steps only, compares those steps, too.
    """
    found = getattr(optimizer, "turns", set)
    counts: set[int] = found()
    return counts


def packs(optimizer: Optimizer, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """By a parameter's name, the pack that it may share with others: "" but for groups."""
    grouping = getattr(optimizer, "packs", None)
    if grouping is None:
        return dict.fromkeys(shapes, "")
    found: dict[str, str] = grouping(shapes)
    return found


def bound(optimizer: Optimizer, slots: Sequence[LayoutSlot]) -> Optimizer:
    """The optimizer for these parameter state tensors.

    Raises ValueError where it cannot train one of them.
    """
    if getattr(optimizer, "per_tensor", False):
        single = [alone(slot, member) for slot in slots for member in slot.members]
        return PerTensor(_told(optimizer, single), tuple(slots))
    return _told(optimizer, slots)


def _told(optimizer: Optimizer, slots: Sequence[LayoutSlot]) -> Optimizer:
    binding = getattr(optimizer, "bound", None)
    if binding is None:
        return optimizer
    told: Optimizer = binding(slots)
    return told


def alone(slot: LayoutSlot, member: LayoutMember) -> LayoutSlot:
    """The state tensor that a parameter would be by itself."""
    only = replace(member, offset=0)
    return replace(slot, name=member.name, shape=member.shape, members=(only,), packed=False)


@dataclass(frozen=True)
class Delegated:
    """All of an optimizer but its step, which whoever stands around it makes."""

    optimizer: Optimizer

    @property
    def name(self) -> str:
        return self.optimizer.name

    def settings(self) -> dict[str, object]:
        return self.optimizer.settings()

    def hyper(self) -> dict[str, float]:
        return self.optimizer.hyper()

    def state(self) -> tuple[StateSpec, ...]:
        return self.optimizer.state()

    def turns(self) -> set[int]:
        return turns(self.optimizer)


@dataclass(frozen=True)
class PerTensor(Delegated):
    """Cuts single parameters out of packs for an optimizer, and puts them back."""

    slots: tuple[LayoutSlot, ...]

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        apart = {spec.name for spec in self.state() if spec.per_parameter}
        update = self.optimizer.update(
            self._single(parameters),
            self._single(gradients),
            {k: self._single(v) if k in apart else v for k, v in state.items()},
            step,
            hyper,
        )
        return OptimizerUpdate(
            self._together(update.parameters),
            {k: self._together(v) if k in apart else v for k, v in update.state.items()},
        )

    def _single(self, tensors: Tensors) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for slot, tensor in zip(self.slots, tensors, strict=True):
            found.extend(slot.unpack(tensor).values())
        return found

    def _together(self, tensors: Tensors) -> list[torch.Tensor]:
        left = iter(tensors)
        return [slot.pack({m.name: next(left) for m in slot.members}) for slot in self.slots]


def dot(left: Tensors, right: Tensors) -> torch.Tensor:
    """The sum of all products, a scalar.

    In double: the first steps' squares are all close to 1, and a long float32 sum of nearly equal
    terms rounds to one side each time (1e-5 off at 50,000 elements).
    """
    parts = [(a * b).to(torch.float64).sum() for a, b in zip(left, right, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(left[0].dtype)
