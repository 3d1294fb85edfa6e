"""A gradient rule: a pure function from the gradients of several losses to the one of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class Direction:
    """What the optimizer gets as this step's gradients, and what the step reports.

    ``gradients`` in the layout that they came in, ``loss`` a scalar, ``outputs`` beside those of
    the loss function (``Trainer.outputs``).
    """

    loss: Tensor
    gradients: list[Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)


class GradientRule(Protocol):
    """Makes one step's gradients out of those of each loss.

    With a rule the loss function may return a dict of named scalars in place of one (a single
    scalar is named ``loss``). Each is differentiated by itself; a loss that shares its forward pass
    with another shares it in the graph, too.

    ``combine`` is traced once with torch operations, without autograd. ``losses`` and ``gradients``
    have the losses' names; gradients are lists of float32 tensors, one for each of ``parameters``
    and of its shape: the *state tensors*, in which small parameters share one flat vector, so that
    a product over the whole parameter vector takes few operators. ``batch`` are the batch entries,
    among them the scalars that switch the rule at run time.
    """

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> Direction:
        """The step's direction. Raises ExportError where a loss or batch entry is missing."""
        ...


def inner_product(left: Gradients, right: Gradients) -> Tensor:
    """Sum over all elements of all tensors, a scalar."""
    parts = [(a * b).sum() for a, b in zip(left, right, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
