"""``lora``: a frozen model with low-rank adapters beside its layers, which are what is trained.

Hu et al. 2021, LoRA: low-rank adaptation of large language models, section 4.1: a layer W x becomes
W x + s B A x with A [r, n] random and B [m, r] zero, so that training begins with the model as it
is. Adapters of a smaller rank are the first rows of A and columns of B (Cho et al. 2024,
Heterogeneous LoRA for federated fine-tuning of on-device foundation models), so the ranks of one
model are a ladder: ``export.submodels(lambda rank: export.lora(model, rank), ..., widths=(1, 2, 4,
8))``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from device_sdk.artifact.parts import is_under
from export.errors import ExportError
from export.given import require_modules


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter: [.., n] to [.., m], beside it by way of [.., r]."""

    down: nn.Parameter
    up: nn.Parameter
    scale: float

    @classmethod
    def of(
        cls, layer: nn.Linear, rank: int, scale: float, generator: torch.Generator | None
    ) -> AdaptedLinear:
        """The layer, its weight and bias shared with it."""
        made: AdaptedLinear = copy.copy(layer)  # type: ignore[assignment]
        made.__class__ = cls
        made._parameters = dict(layer._parameters)
        made.scale = scale
        made.down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        nn.init.kaiming_uniform_(made.down, a=5**0.5, generator=generator)
        made.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        return made

    def forward(self, input: Tensor) -> Tensor:
        inner = functional.linear(functional.linear(input, self.down), self.up)
        return super().forward(input) + self.scale * inner


def lora(
    model: nn.Module,
    rank: int,
    *,
    layers: Collection[str] = (),
    trained: Collection[str] = (),
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """The model frozen, with adapters of ``rank`` on its linear layers.

    The given model stays as it is; what is frozen is shared with it, not copied.

    layers: names of modules whose ``nn.Linear`` layers get adapters; none for all of the model's.
    trained: names of modules that are trained whole beside them, such as ``("head",)``.
    scale: s above, LoRA's alpha / r. It is the same at every rank: one that falls with the rank
        would make another function of the same adapters, which are then no ladder.
    generator: of A's first values; None for torch's own.

    Raises ExportError for a name that is no module's, and where no linear layer is left to adapt.
    ``nn.MultiheadAttention`` multiplies its weights itself: its projections get no adapter.
    """
    require_modules(model, layers, "layers")
    require_modules(model, trained, "trained")
    if rank < 1:
        raise ExportError(f"the adapters' rank is {rank}", instead="1 or more")
    own = {}
    for name, tensor in model.named_parameters():
        moves = is_under(name, trained)
        value = tensor.detach().clone() if moves else tensor.detach()
        own[id(tensor)] = nn.Parameter(value, requires_grad=moves)
    buffers = {id(tensor): tensor for tensor in model.buffers()}
    made = copy.deepcopy(model, {**own, **buffers})
    found = 0
    for path, parent in [*made.named_modules()]:
        for child, layer in [*parent.named_children()]:
            name = f"{path}.{child}".lstrip(".")
            if (
                type(layer) is nn.Linear
                and not is_under(name, trained)
                and (not layers or is_under(name, layers))
            ):
                setattr(parent, child, AdaptedLinear.of(layer, rank, scale, generator))
                found += 1
    if not found:
        raise ExportError(
            "there is no linear layer to put an adapter on",
            instead="layers=(...) with the names of modules that hold nn.Linear layers",
        )
    return made
