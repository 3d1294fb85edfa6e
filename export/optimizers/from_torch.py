"""torch's optimizers as they are given: made of the model's parameters, in groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from export.errors import ExportError
from export.hooks import refuse_changed
from export.optimizers.combinators import Around
from export.optimizers.groups import Group, Groups
from export.optimizers.protocol import Optimizer
from export.optimizers.traced import Traced


def as_optimizer(given: object, model: nn.Module) -> Optimizer:
    """The given optimizer of ours, or the equal of torch's.

    Raises ExportError for what is neither, naming the one that is meant.
    """
    if isinstance(given, torch.optim.Optimizer):
        return _converted(given, model)
    if isinstance(given, Around):
        around: Any = replace(given, optimizer=as_optimizer(given.optimizer, model))
        return around  # type: ignore[no-any-return]
    if isinstance(given, type | FunctionType | partial):
        kind: Any = given.args[0] if isinstance(given, partial) and given.args else given
        name = getattr(kind, "__name__", type(kind).__name__)
        torchs = isinstance(given, type) and issubclass(given, torch.optim.Optimizer)
        of = "model.parameters(), " if torchs else ""
        raise ExportError(f"optimizer is {name} itself, not made", instead=f"{name}({of}lr=...)")
    if all(hasattr(given, name) for name in ("name", "settings", "hyper", "state", "update")):
        return given  # type: ignore[return-value]
    kind = type(given)
    raise ExportError(
        f"optimizer is a {kind.__module__}.{kind.__name__}, which is no part of a graph",
        instead="export.AdamW(lr=...), export.Sgd(lr=..., momentum=...), another of "
        "docs/export/optimizers.md, a torch.optim.Optimizer made of the model's parameters, or an "
        "export.Optimizer of your own",
    )


def trained_by(given: object, model: nn.Module) -> set[str]:
    """Names of the parameters that the optimizer moves: of torch's, those that it was given."""
    names = {n: id(p) for n, p in model.named_parameters() if p.requires_grad}
    if isinstance(given, Around):
        return trained_by(given.optimizer, model)
    if not isinstance(given, torch.optim.Optimizer):
        return set(names)
    held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    return {name for name, key in names.items() if key in held}


def _converted(given: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    ours: list[Optimizer] = []
    choices: list[list[str]] = []
    for group in given.param_groups:
        if "initial_lr" in group:
            raise ExportError(
                "a torch scheduler changes this optimizer's learning rate, which an export "
                "would not see",
                instead="export.Scheduled(export.AdamW(lr=...), export.schedules.Cosine(...)), or "
                "Trainer.step(batch, hyper={'lr': ...})",
            )
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in names]
        if strange:
            raise ExportError(
                f"optimizer holds a parameter of shape {list(strange[0].shape)} that is none of "
                "the model's",
                instead="an optimizer made of this model's parameters",
            )
        chosen = [names[id(p)] for p in group["params"] if id(p) in names]
        if chosen:
            ours.append(Traced.taken(given, group))
            choices.append(chosen)
    refuse_changed(given)
    if not ours:
        raise ExportError("optimizer holds no parameter of the model that requires a gradient")
    rest, *others = ours
    if not others:
        return rest
    # Names, not patterns: each group's are known.
    groups = [Group(chosen, one) for chosen, one in zip(choices[1:], others, strict=True)]
    return Groups(rest, *groups)
