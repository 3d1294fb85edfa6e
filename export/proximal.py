"""FedProx's proximal term: a pull towards the parameters that the round began with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ANCHOR = "anchor"


class _Anchors(nn.Module):
    """Holds buffers. It passes its input on, since a Sequential runs all its children."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_anchor(model: nn.Module) -> nn.Module:
    """Give the model a buffer ``anchor.<parameter>`` for each trained parameter; returns the model.

    Anchors start as copies of the parameters. A device sets them when a round begins:

        trainer.set_parameters({f"anchor.{name}": value for name, value in downloaded.items()})

    They are part of the artifact's state, are no parameters (no optimizer moves them, an average
    of parameters does not hold them), and prediction does not read them. ValueError where the
    model has something of that name already.
    """
    if hasattr(model, ANCHOR):
        raise ValueError(
            f"the model already has {ANCHOR!r}; with_anchor is called once for each model"
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    root = _Anchors()
    for name, parameter in trained:
        *path, last = name.split(".")
        holder: nn.Module = root
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, _Anchors())
            holder = holder.get_submodule(part)
        holder.register_buffer(last, parameter.detach().clone())
    model.add_module(ANCHOR, root)
    return model


def proximal(model: nn.Module, mu: Tensor) -> Tensor:
    """mu / 2 * |w - anchor|^2 over all trained parameters; add it to a loss.

    Li et al. 2020, Federated optimization in heterogeneous networks (FedProx), equation 2. ``mu``
    is a float32 scalar of the batch, so one artifact serves every mu; mu = 0 is FedAvg. Raises
    ValueError for a model that ``with_anchor`` has not prepared.
    """
    anchors = {n: b for n, b in model.named_buffers() if n.startswith(f"{ANCHOR}.")}
    if not anchors:
        raise ValueError("the model has no anchor; give it one by with_anchor(model)")
    parameters = dict(model.named_parameters())
    here = torch.cat([parameters[name[len(ANCHOR) + 1 :]].reshape(-1) for name in anchors])
    there = torch.cat([anchor.reshape(-1) for anchor in anchors.values()])
    gap = here - there
    return 0.5 * mu * (gap * gap).sum()
