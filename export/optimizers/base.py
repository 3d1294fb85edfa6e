"""What an optimizer is: a pure function on tensors, with declared state and run-time inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class StateSpec:
    """One kind of optimizer state.

    With ``per_parameter`` there is one tensor for each parameter state tensor, of its shape behind
    the ``lead`` axes (a history of q gradients has lead (q,)); without, one tensor of shape
    ``lead``. All start at zero. ``guarded=False`` leaves it out of the check for NaN and infinity;
    right only where a non-finite value in it always makes the new parameters non-finite too.
    """

    name: str
    per_parameter: bool = True
    lead: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    guarded: bool = True


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
        raise ValueError(message)
