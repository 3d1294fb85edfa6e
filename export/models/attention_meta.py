"""The attention meta-network over a base network's parameters, as one train step.

Method: FedAMN (papers/fedamn, sections 3.2 and 3.3). Its formulas are missing from our text; what
is computed here is written out in docs/methods/attention.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from device_sdk.artifact.flat_layout import FlatLayout, flat_layout
from export.build import Exported, export_train_step
from export.optimizers import Adam, Optimizer
from export.step import LossFunction

INPUTS = (
    *("neighbours", "shared", "own", "drift", "sketches", "query"),
    *("first", "second", "own_weight"),
)
"""Batch entries that the meta-network adds to those of the base network's loss."""


class AttentionMeta(nn.Module):
    """Two layers of attention for each parameter group of a base network.

    Inputs, with n neighbours, p parameters, g groups and d numbers a sketch, all float32:
    ``neighbours`` [n, p] are w_j, ``shared`` [p] is w_g, ``own`` [p] is w_i, ``drift`` [p] is added
    to the mixture (how far the base network has moved since it was mixed), ``sketches`` [n, g, d]
    are s_j, ``query`` [g, d] is s_i; ``first`` and ``second`` [] are 1 for a layer that is on and 0
    for one that is off. ``own_weight`` [], 0 or more: in layer 1 the own network weighs as much
    as so many favourite neighbours, which nothing learned changes.

    Parameters, of width r: ``queries`` A_Q, ``keys`` A_K and ``second_keys`` A_L [g, r, d],
    ``likeness`` L [g, g], ``bias`` [g, 2]. A_K and A_L start at 0, L at ``key_scale`` / g
    throughout: at 0 all neighbours weigh the same, above it those weigh more whose sketches are
    near the own ones, all groups taken together (one group's sketch is a noisy witness). The biases
    start at [``own_bias``, 0], whose softmax layer 2 gives (mixture, global) at first.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        sketch: int = 64,
        width: int = 16,
        key_scale: float = 0.0,
        own_bias: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if sketch < 1 or width < 1 or not math.isfinite(key_scale) or not math.isfinite(own_bias):
            raise ValueError("sketch and width must be at least 1, key_scale and own_bias finite")
        self.layout = layout
        self.width = width
        groups = len(layout.groups)
        generator = torch.Generator().manual_seed(seed)
        queries = torch.randn(groups, width, sketch, generator=generator) / math.sqrt(width)
        self.queries = nn.Parameter(queries)
        self.keys = nn.Parameter(torch.zeros_like(queries))
        self.second_keys = nn.Parameter(torch.zeros_like(queries))
        self.likeness = nn.Parameter(torch.full((groups, groups), key_scale / groups))
        self.bias = nn.Parameter(torch.tensor([[own_bias, 0.0]]).repeat(groups, 1))

    def weights(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Layer 1's weights over the neighbours and the own network [g, n + 1], layer 2's over
        (u, w_g) [g, 2]."""
        query = (self.queries @ batch["query"].unsqueeze(-1)).squeeze(-1)
        # q . (A_K s) = (A_K' q) . s: one vector a group instead of one a neighbour.
        toward = (self.keys.transpose(1, 2) @ query.unsqueeze(-1)).squeeze(-1)
        scale = 1 / math.sqrt(self.width)
        scores = (batch["sketches"] * toward).sum(-1).T * scale
        apart = (batch["sketches"] - batch["query"]).square().sum(-1).T
        scores = scores - self.likeness @ apart / 2
        # The favourite has 1 here, so own_weight is in units of it.
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        own = batch["own_weight"].reshape(1, 1).expand(len(weights), 1)
        weights = torch.cat([weights, own], -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = (weights[:, :-1].T.unsqueeze(-1) * batch["sketches"]).sum(0)
        mixed = mixed + weights[:, -1:] * batch["query"]
        first = batch["first"]
        mixed = first * mixed + (1 - first) * batch["query"]
        toward = (self.second_keys.transpose(1, 2) @ query.unsqueeze(-1)).squeeze(-1)
        score = (mixed * toward).sum(-1) * scale + self.bias[:, 0]
        share = batch["second"] * torch.softmax(torch.stack([score, self.bias[:, 1]], -1), -1)[:, 1]
        return weights, torch.stack([1 - share, share], -1)

    def mixture(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The mixed parameters [p] with the drift, and both layers' weights."""
        first, second = self.weights(batch)
        parts = []
        for group, (start, end) in enumerate(self.layout.spans):
            own = batch["own"][start:end]
            heard = first[group, :-1] @ batch["neighbours"][:, start:end] + first[group, -1] * own
            mixed = batch["first"] * heard + (1 - batch["first"]) * own
            shared = batch["shared"][start:end]
            parts.append(second[group, 0] * mixed + second[group, 1] * shared)
        return torch.cat(parts) + batch["drift"], first, second


class _Objective(nn.Module):
    """The base network's loss as a module's forward, for functional_call."""

    def __init__(self, base: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.base = base
        self._loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        result = self._loss(self.base, batch)
        return result[0] if isinstance(result, tuple) else result


def meta_loss(base: nn.Module, loss: LossFunction) -> LossFunction:
    """The loss of the base network at the mixed parameters, as a loss of an AttentionMeta."""
    objective = _Objective(base, loss)

    def at_the_mixture(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not isinstance(model, AttentionMeta):
            raise TypeError(f"the meta-loss takes an AttentionMeta, not a {type(model).__name__}")
        vector, _, _ = model.mixture(batch)
        named, start = {}, 0
        for entry in model.layout.entries:
            named[f"base.{entry.name}"] = vector[start : start + entry.size].reshape(entry.shape)
            start += entry.size
        own = {name: value for name, value in batch.items() if name not in INPUTS}
        found: Tensor = torch.func.functional_call(objective, named, (own,))
        return found

    return at_the_mixture


def mixture(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prediction: ``mixed`` [p], ``first`` [g, n + 1], the own network's share at its end, and
    ``second`` [g, 2]."""
    if not isinstance(model, AttentionMeta):
        raise TypeError(f"mixture takes an AttentionMeta, not a {type(model).__name__}")
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


def export_attention(
    directory: str | Path,
    base: nn.Module,
    loss: LossFunction,
    example_batch: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    sketch: int = 64,
    width: int = 16,
    key_scale: float = 0.0,
    own_bias: float = 0.0,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    verify: bool = True,
    name: str = "attention",
) -> Exported:
    """Write the meta-network's artifact for a base network, its loss and its batches.

    ``base``, ``loss``, ``example_batch`` and ``dynamic`` are those of the base network's own
    artifact. A step is one meta-step; a prediction gives the mixture and the attention weights, for
    any number of neighbours. Raises ValueError where the base network cannot be mixed, or a batch
    entry has one of the names in ``INPUTS``; ExportError as ``export.train_step`` does.
    """
    taken = sorted(set(INPUTS) & set(example_batch))
    if taken:
        raise ValueError(f"the batch entry {taken[0]!r} is one of the meta-network's own inputs")
    layout = base_layout(base)
    meta = AttentionMeta(
        layout, sketch=sketch, width=width, key_scale=key_scale, own_bias=own_bias, seed=seed
    )
    axes = {"neighbours": {0: "neighbours"}, "sketches": {0: "neighbours"}}
    return export_train_step(
        meta,
        meta_loss(base, loss),
        {**example_batch, **_example(layout, base, sketch, seed)},
        optimizer=optimizer or Adam(lr=0.02),
        dynamic={**dynamic, **axes},
        predict=mixture,
        directory=directory,
        verify=verify,
        name=name,
    )


def _example(layout: FlatLayout, base: nn.Module, sketch: int, seed: int) -> dict[str, Tensor]:
    """Neighbours around the base network's own parameters, to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    named = {name: p.detach().numpy() for name, p in base.named_parameters()}
    centre = torch.from_numpy(layout.flatten(named))
    groups, n = len(layout.groups), 3

    def near(*lead: int) -> Tensor:
        return centre + 0.02 * torch.randn(*lead, layout.size, generator=g)

    return {
        "neighbours": near(n),
        "shared": near(),
        "own": near(),
        "drift": 0.01 * torch.randn(layout.size, generator=g),
        "sketches": torch.randn(n, groups, sketch, generator=g) / math.sqrt(sketch),
        "query": torch.randn(groups, sketch, generator=g) / math.sqrt(sketch),
        "first": torch.tensor(1.0),
        "second": torch.tensor(1.0),
        "own_weight": torch.tensor(1.0),
    }
