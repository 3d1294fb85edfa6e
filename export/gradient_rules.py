"""Gradient rules: pure functions from the gradients of several losses to the one of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from export.errors import ExportError

# A gradient rule: a pure function from the gradients of several losses to the one of the step.

Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class StepDirection:
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

    A parameter that none of the losses depends on is not trained, and not among ``parameters``,
    unless the rule has ``all_parameters = True``: its gradients are then zeros.
    """

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> StepDirection:
        """The step's direction. Raises ExportError where a loss or batch entry is missing."""
        ...


def inner_product(left: Gradients, right: Gradients) -> Tensor:
    """Sum over all elements of all tensors, a scalar."""
    parts = [(a * b).sum() for a, b in zip(left, right, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# Mutual learning's conflict projection.


@dataclass(frozen=True)
class ConflictProjection:
    """Takes out of the public gradient what would undo the local one.

    MAFML (papers/mafml), equation 7, over the whole parameter vector: where <g_pub, g_loc> < 0,
    g_pub' = g_pub - <g_pub, g_loc> / |g_loc|^2 * g_loc; elsewhere g_pub' = g_pub. The step is
    weight_local * g_loc + weight_public * g_pub'.

    Takes two losses, ``local`` and ``public``, and three float32 scalars of the batch:
    ``weight_local``, ``weight_public`` and ``project`` (1 projects, 0 leaves g_pub as it is).
    Reports weight_local * local + weight_public * public as the loss, and the outputs ``conflict``
    (1.0 where the inner product is negative, whether projected or not, else 0.0) and
    ``inner_product``, both float32 [].
    """

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> StepDirection:
        if set(losses) != {"local", "public"}:
            raise ExportError(
                f"the conflict projection got losses named {', '.join(losses)}",
                instead="a loss function that returns {'local': ..., 'public': ...}",
            )
        missing = {"weight_local", "weight_public", "project"} - set(batch)
        if missing:
            raise ExportError(
                f"the conflict projection needs batch entries {', '.join(sorted(missing))}",
                instead="float32 scalars of these names in the example batch",
            )
        local, public = gradients["local"], gradients["public"]
        inner = inner_product(public, local)
        size = inner_product(local, local)
        conflict = (inner < 0).to(inner.dtype)
        # A gradient of zero conflicts with nothing; the guard keeps 0 / 0 out of the graph.
        safe = torch.where(size > 0, size, torch.ones_like(size))
        weight_public = batch["weight_public"]
        # One coefficient for g_loc: its own weight, and what the projection takes from g_pub.
        of_local = (
            batch["weight_local"] - weight_public * batch["project"] * conflict * inner / safe
        )
        return StepDirection(
            batch["weight_local"] * losses["local"] + weight_public * losses["public"],
            [of_local * a + weight_public * b for a, b in zip(local, public, strict=True)],
            {"conflict": conflict, "inner_product": inner},
        )


# An L2 penalty on all parameters, cheap where there are many small ones.


@dataclass(frozen=True)
class WeightPenalty:
    """Adds c / 2 * |w|^2 over all trained parameters to the loss, c a float32 scalar of the batch.

    ``weight`` names that batch entry. Two operators a state tensor, where the same sum in a loss
    function takes several a parameter. Unlike an optimizer's decoupled weight decay it is part of
    the gradient that adaptive optimizers scale, and of the reported loss.
    """

    weight: str = "l2"
    all_parameters: ClassVar[bool] = True

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> StepDirection:
        if len(losses) != 1:
            raise ExportError(f"the weight penalty takes one loss, not {', '.join(losses)}")
        if self.weight not in batch:
            raise ExportError(
                f"the weight penalty needs the batch entry {self.weight!r}",
                instead="a float32 scalar of this name in the example batch",
            )
        name, loss = next(iter(losses.items()))
        weight = batch[self.weight]
        return StepDirection(
            loss + weight * 0.5 * inner_product(parameters, parameters),
            [g + weight * p for g, p in zip(gradients[name], parameters, strict=True)],
        )


# What becomes of a step's gradients before the optimizer sees them.
