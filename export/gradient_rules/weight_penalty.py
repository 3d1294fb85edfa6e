"""An L2 penalty on all parameters, cheap where there are many small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from export.errors import ExportError
from export.gradient_rules.base import Direction, Gradients, inner_product


@dataclass(frozen=True)
class WeightPenalty:
    """Adds c / 2 * |w|^2 over all trained parameters to the loss, c a float32 scalar of the batch.

    ``weight`` names that batch entry. Two operators a state tensor, where the same sum in a loss
    function takes several a parameter. Unlike an optimizer's decoupled weight decay it is part of
    the gradient that adaptive optimizers scale, and of the reported loss.
    """

    weight: str = "l2"

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> Direction:
        if len(losses) != 1:
            raise ExportError(f"the weight penalty takes one loss, not {', '.join(losses)}")
        if self.weight not in batch:
            raise ExportError(
                f"the weight penalty needs the batch entry {self.weight!r}",
                instead="a float32 scalar of this name in the example batch",
            )
        name, loss = next(iter(losses.items()))
        weight = batch[self.weight]
        return Direction(
            loss + weight * 0.5 * inner_product(parameters, parameters),
            [g + weight * p for g, p in zip(gradients[name], parameters, strict=True)],
        )
