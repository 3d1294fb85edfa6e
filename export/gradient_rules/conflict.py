"""Mutual learning's conflict projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from export.errors import ExportError
from export.gradient_rules.base import Direction, Gradients, inner_product


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
    ) -> Direction:
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
        return Direction(
            batch["weight_local"] * losses["local"] + weight_public * losses["public"],
            [of_local * a + weight_public * b for a, b in zip(local, public, strict=True)],
            {"conflict": conflict, "inner_product": inner},
        )
