"""Passing over parameters that have no gradient in one way of a step, as torch's optimizers do.

torch then leaves a parameter, its state and its count of steps as they are. A gradient of 0 does
the same to an optimizer without memory (``Sgd``); of others, parameters that are passed over
together are a group of their own that counts its own steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from export.axes import Shape
from export.insides import disable_current_modes
from export.layout import LayoutMember, LayoutSlot
from export.optimizers.combinators import Accumulated, Around
from export.optimizers.groups import Group, Groups
from export.optimizers.protocol import (
    Optimizer,
    OptimizerUpdate,
    StateSpec,
    Tensors,
    bound,
    turns,
)

_WITHOUT: ContextVar[frozenset[str]] = ContextVar("_WITHOUT", default=frozenset())


@contextmanager
def passing_over(without: Collection[str]) -> Iterator[None]:
    """Inside, these parameters have no gradient."""
    token = _WITHOUT.set(frozenset(without))
    try:
        yield
    finally:
        _WITHOUT.reset(token)


@dataclass(frozen=True)
class Passing(Around):
    """Leaves its parameters and state as they are where they have no gradient; counts the others.

    ``names``: the parameters, which have a gradient together or none.
    """

    names: frozenset[str]

    def _own(self) -> dict[str, object]:
        return {}  # its names are its group's

    def state(self) -> tuple[StateSpec, ...]:
        skipped = StateSpec("skipped", per_parameter=False, dtype=torch.int64)
        return (skipped, *super().state())

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        (skipped,) = state["skipped"]
        if self.names <= _WITHOUT.get():
            return OptimizerUpdate(list(parameters), {**state, "skipped": [skipped + 1]})
        update = self.optimizer.update(parameters, gradients, state, step - skipped, hyper)
        return OptimizerUpdate(update.parameters, {**update.state, "skipped": [skipped]})


def passes(optimizer: Optimizer, shapes: Mapping[str, Shape]) -> dict[str, bool | None]:
    """Whether each parameter is passed over: True by a gradient of 0; False if it is `counted`.

    None where neither does: gradients that are accumulated, state that all gradients make together.
    """
    if isinstance(optimizer, Accumulated):
        found = passes(optimizer.optimizer, shapes)
        return {name: each or None for name, each in found.items()}
    if isinstance(optimizer, Around):
        return passes(optimizer.optimizer, shapes)
    if isinstance(optimizer, Groups):
        return {
            name: each
            for part, names in optimizer.assigned(shapes)
            for name, each in passes(part, {name: shapes[name] for name in names}).items()
        }
    return dict.fromkeys(shapes, _of_zeros(optimizer))


def together(
    names: Iterable[str], without: Sequence[Collection[str]]
) -> tuple[frozenset[str], ...]:
    """The names in these sets, which may overlap, by the sets that they are in."""
    found: dict[tuple[bool, ...], list[str]] = {}
    for name in names:
        inside = tuple(name in each for each in without)
        if any(inside):
            found.setdefault(inside, []).append(name)
    return tuple(map(frozenset, found.values()))


def counted(
    optimizer: Optimizer, shapes: Mapping[str, Shape], classes: Collection[Collection[str]]
) -> Optimizer:
    """The optimizer, with a group that counts its own steps for each of these `together`."""
    own = [[name for name in shapes if name in names] for names in classes]
    own = [names for names in own if names]
    if not own:
        return optimizer
    if isinstance(optimizer, Around):
        around: Any = replace(optimizer, optimizer=counted(optimizer.optimizer, shapes, own))
        return around  # type: ignore[no-any-return]
    if isinstance(optimizer, Groups):
        return optimizer.with_optimizers(
            [
                counted(part, {name: shapes[name] for name in names}, own)
                for part, names in optimizer.assigned(shapes)
            ]
        )
    return Groups(optimizer, *(Group(names, Passing(optimizer, frozenset(names))) for names in own))


def _of_zeros(optimizer: Optimizer) -> bool | None:
    """What `passes` says of each parameter of one that trains all in the same way."""
    member = LayoutMember("parameter", (4, 3), 0)
    slot = LayoutSlot("parameter", "parameter", torch.float32, (4, 3), (member,), packed=False)
    try:
        with disable_current_modes():  # asked while a step is recorded
            told = bound(optimizer, [slot])
            return _tried(told, sorted({0, 1, 2, 3, 7, 1000} | turns(told)))
    except Exception:  # one of the user's own, that takes other parameters
        return None


def _tried(optimizer: Optimizer, steps: Sequence[int]) -> bool | None:
    def some(*shape: int) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, torch.Size(shape).numel()).reshape(shape)

    specs = optimizer.state()
    state = {
        spec.name: [some(*spec.lead, *((4, 3) if spec.per_parameter else ())).to(spec.dtype)]
        for spec in specs
    }
    hyper = {name: torch.tensor(0.3) for name in optimizer.hyper()}

    def after(gradient: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        update = optimizer.update([some(4, 3)], [gradient], state, torch.tensor(step), hyper)
        return *update.parameters, *(update.state[spec.name][0] for spec in specs)

    def equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
        return all(map(torch.equal, ones, others))

    def shared(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [v for v, spec in zip(values[1:], specs, strict=True) if not spec.per_parameter]

    before = (some(4, 3), *(state[spec.name][0] for spec in specs))
    still = [after(torch.zeros(4, 3), step) for step in steps]
    moved = [after(some(4, 3), step) for step in steps]
    if all(equal(each, before) for each in still) and all(equal(each, moved[0]) for each in moved):
        return True
    pairs = zip(still, moved, strict=True)
    return False if all(equal(shared(one), shared(other)) for one, other in pairs) else None
