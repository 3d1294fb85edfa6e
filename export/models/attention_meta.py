"""The attention meta-network over a base network's parameters, as one train step.

Method: FedAMN (papers/fedamn, sections 3.2 and 3.3). Its formulas are missing from our text; what
is computed here is written out in docs/methods/attention.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from device_sdk.artifact.flat_layout import FlatLayout, flat_layout
from export.build import Recipe
from export.optimizers import Adam
from export.step import LossesFunction, LossFunction


@dataclass(frozen=True)
class MetaDesign:
    """How wide a meta-network is, d numbers a ``sketch`` and ``width`` r, and where it starts."""

    sketch: int = 64
    width: int = 16
    key_scale: float = 0.0
    own_bias: float = 0.0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.key_scale) and math.isfinite(self.own_bias)
        if self.sketch < 1 or self.width < 1 or not finite:
            raise ValueError("sketch and width must be at least 1, key_scale and own_bias finite")


PLAIN = MetaDesign()


class AttentionMeta(nn.Module):
    """Two layers of attention for each parameter group of a base network.

    Inputs, with n neighbours, p parameters of which p_k are group k's, g groups and d numbers a
    sketch, all float32: ``neighbours.k`` [n, p_k] for each group are w_j - w_g, ``start`` [p] is
    w_g, with what is added to the mixture (how far the base network has moved since it was mixed),
    ``sketches`` [n, g, d] are s_j, ``query`` [g, d] is s_i; ``second`` [] is 1 for layer 2 on and 0
    for off. Layer 1 is off where the own network is the only neighbour.

    Parameters, of width r: ``queries`` A_Q, ``keys`` A_K and ``second_keys`` A_L [g, r, d],
    ``likeness`` L [g, g], ``bias`` [g, 2]. A_K and A_L start at 0, L at ``key_scale`` / g
    throughout: at 0 all neighbours weigh the same, above it those weigh more whose sketches are
    near the own ones, all groups taken together (one group's sketch is a noisy witness). The biases
    start at [``own_bias``, 0], whose softmax layer 2 gives (mixture, global) at first.
    """

    def __init__(self, layout: FlatLayout, design: MetaDesign = PLAIN, *, seed: int = 0) -> None:
        super().__init__()
        self.layout = layout
        self.width = design.width
        groups = len(layout.groups)
        generator = torch.Generator().manual_seed(seed)
        queries = torch.randn(groups, design.width, design.sketch, generator=generator)
        queries = queries / math.sqrt(design.width)
        self.queries = nn.Parameter(queries)
        self.keys = nn.Parameter(torch.zeros_like(queries))
        self.second_keys = nn.Parameter(torch.zeros_like(queries))
        self.likeness = nn.Parameter(torch.full((groups, groups), design.key_scale / groups))
        self.bias = nn.Parameter(torch.tensor([[design.own_bias, 0.0]]).repeat(groups, 1))

    @property
    def inputs(self) -> frozenset[str]:
        """Batch entries that the meta-network adds to those of the base network's loss."""
        groups = (f"neighbours.{k}" for k in range(len(self.layout.groups)))
        return frozenset({"start", "sketches", "query", "second", *groups})

    def weights(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Layer 1's weights over the neighbours [g, n], layer 2's of u and of w_g [g, 1]."""
        query = batch["query"].unsqueeze(1)
        sketches = batch["sketches"].transpose(0, 1)
        asked = query / math.sqrt(self.width) @ self.queries.transpose(1, 2)
        apart = (sketches - query).square().sum(-1)
        # q . (A_K s) = (q A_K) . s: one vector a group instead of one a neighbour.
        scores = (asked @ self.keys @ sketches.transpose(1, 2)).squeeze(1)
        first = torch.softmax(scores + self.likeness @ (apart / -2), -1)
        mixed = first.unsqueeze(1) @ sketches
        likes = (mixed * (asked @ self.second_keys)).sum(-1)
        mine, theirs = self.bias.split(1, -1)
        share = batch["second"] * torch.sigmoid(theirs - mine - likes)
        return first, 1 - share, share

    def mixture(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The mixed parameters [p], and both layers' weights."""
        first, heard, share = self.weights(batch)
        # beta_1 u + beta_2 w_g = w_g + beta_1 (sum of a_j (w_j - w_g)): one product a group.
        rows = (heard * first).split(1)
        moved = [row @ batch[f"neighbours.{k}"] for k, row in enumerate(rows)]
        mixed = batch["start"] + torch.cat(moved, 1).squeeze(0)
        return mixed, first, torch.cat([heard, share], -1)


class _Objective(nn.Module):
    """The base network's loss as a module's forward, for functional_call."""

    def __init__(self, base: nn.Module, loss: LossFunction | LossesFunction) -> None:
        super().__init__()
        self.base = base
        self._loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        result = self._loss(self.base, batch)
        found = result[0] if isinstance(result, tuple) else result
        if isinstance(found, dict):
            raise TypeError(f"the base network's loss is several ({', '.join(found)}), not one")
        return found


def meta_loss(base: nn.Module, loss: LossFunction | LossesFunction) -> LossFunction:
    """The loss of the base network at the mixed parameters, as a loss of an AttentionMeta."""
    objective = _Objective(base, loss)

    def at_the_mixture(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not isinstance(model, AttentionMeta):
            raise TypeError(f"the meta-loss takes an AttentionMeta, not {type(model).__name__}")
        vector, _, _ = model.mixture(batch)
        entries = model.layout.entries
        parts = vector.split([entry.size for entry in entries])
        named = {
            f"base.{entry.name}": part.reshape(entry.shape)
            for entry, part in zip(entries, parts, strict=True)
        }
        own = {name: value for name, value in batch.items() if name not in model.inputs}
        found: Tensor = torch.func.functional_call(objective, named, (own,))
        return found

    return at_the_mixture


def mixture(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prediction: ``mixed`` [p], ``first`` [g, n] and ``second`` [g, 2]."""
    if not isinstance(model, AttentionMeta):
        raise TypeError(f"mixture takes an AttentionMeta, not {type(model).__name__}")
    mixed, first, second = model.mixture(batch)
    return {"mixed": mixed, "first": first, "second": second}


def base_layout(base: nn.Module) -> FlatLayout:
    """The layout of a base network; ValueError where it has buffers or frozen parameters."""
    if next(iter(base.buffers()), None) is not None:
        raise ValueError(
            "the base network has buffers (batch norm?), which a mixture of parameters cannot "
            "carry: use group or layer norm"
        )
    frozen = [name for name, p in base.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(f"{frozen[0]!r} is frozen; the mixture is over trained parameters")
    return flat_layout({name: tuple(p.shape) for name, p in base.named_parameters()})


def attention_recipe(base: Recipe, design: MetaDesign = PLAIN, *, seed: int = 0) -> Recipe:
    """The meta-network for a base network, its loss and its batches, as its own recipe has them.

    A step is one meta-step; a prediction gives the mixture and the attention weights, for any
    number of neighbours. The optimizer is Adam with 0.02. Raises ValueError where the base network
    cannot be mixed, or a batch entry has one of the names of ``AttentionMeta.inputs``.
    """
    layout = base_layout(base.model)
    meta = AttentionMeta(layout, design, seed=seed)
    taken = sorted(meta.inputs & set(base.example_batch))
    if taken:
        raise ValueError(f"the batch entry {taken[0]!r} is one of the meta-network's own inputs")
    by_neighbour = {name for name in meta.inputs if name.startswith("neighbours.")} | {"sketches"}
    return Recipe(
        meta,
        meta_loss(base.model, base.loss),
        {**base.example_batch, **_example(layout, base.model, design.sketch, seed)},
        {**base.dynamic, **{name: {0: "neighbours"} for name in by_neighbour}},
        Adam(lr=0.02),
        predict=mixture,
        name="attention",
    )


def _example(layout: FlatLayout, base: nn.Module, sketch: int, seed: int) -> dict[str, Tensor]:
    """Neighbours around the base network's own parameters, to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    named = {name: p.detach().numpy() for name, p in base.named_parameters()}
    groups, n = len(layout.groups), 3
    neighbours = {
        f"neighbours.{k}": 0.02 * torch.randn(n, end - start, generator=g)
        for k, (start, end) in enumerate(layout.spans)
    }
    return {
        **neighbours,
        "start": torch.from_numpy(layout.flatten(named)),
        "sketches": torch.randn(n, groups, sketch, generator=g) / math.sqrt(sketch),
        "query": torch.randn(groups, sketch, generator=g) / math.sqrt(sketch),
        "second": torch.tensor(1.0),
    }
