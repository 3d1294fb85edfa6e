"""What is surveyed: a torch model, its loss, a batch and an optimizer, as each side makes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import export

Made = Callable[[nn.Module], torch.optim.Optimizer]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters with a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Pair:
    """How each side makes it for a model; where ``ours`` is torch's own, it is exported as such."""

    ours: Callable[[nn.Module], Any]
    torchs: Made


def _same(made: Made) -> Pair:
    return Pair(made, made)


def no_decay_on_vectors(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose decay spares biases and norms."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained(model) if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained(model) if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )


def layer_wise(model: nn.Module) -> torch.optim.Optimizer:
    """Rates that fall from the last parameter to the first."""
    parameters = trained(model)
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.01 * 0.9**depth} for depth, p in enumerate(parameters[::-1])],
        lr=0.01,
        momentum=0.9,
    )


class Recipe(torch.optim.AdamW):
    """AdamW that clips by norm and warms its rate up over ten steps."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            group["lr"] = 1e-3 * min(1.0, 0.1 * group["done"])
        super().step()


class Accumulating(torch.optim.SGD):
    """SGD that steps each second time, along the mean of the gradients."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["done"] = group.get("done", 0) + 1
        kept = group.setdefault("kept", [torch.zeros_like(p) for p in group["params"]])
        for total, p in zip(kept, group["params"], strict=True):
            total += p.grad if p.grad is not None else 0.0
        if group["done"] % 2 == 0:
            for total, p in zip(kept, group["params"], strict=True):
                p.grad = total / 2
            super().step()
            group["kept"] = [torch.zeros_like(p) for p in group["params"]]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as public code has it."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float]):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = average.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS = {
    "adam": Pair(lambda m: export.Adam(1e-3), lambda m: torch.optim.Adam(trained(m), 1e-3)),
    "sgd": Pair(
        lambda m: export.Sgd(0.01, momentum=0.9),
        lambda m: torch.optim.SGD(trained(m), 0.01, momentum=0.9),
    ),
    "plain sgd": Pair(lambda m: export.Sgd(0.01), lambda m: torch.optim.SGD(trained(m), 0.01)),
    "nesterov": _same(
        lambda m: torch.optim.SGD(trained(m), 0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    ),
    "coupled adam": _same(
        lambda m: torch.optim.Adam(trained(m), 1e-3, weight_decay=1e-2, amsgrad=True)
    ),
    "rmsprop": _same(lambda m: torch.optim.RMSprop(trained(m), 1e-3, momentum=0.9)),
    "adagrad": _same(lambda m: torch.optim.Adagrad(trained(m), 0.01)),
    "no decay on vectors": _same(no_decay_on_vectors),
    "layer-wise": _same(layer_wise),
    "recipe": Pair(
        lambda m: export.Clipped(
            export.Scheduled(export.AdamW(1e-3), export.schedules.Linear(0.1, 1.0, 9)), norm=1.0
        ),
        lambda m: Recipe(trained(m), 1e-3),
    ),
    "accumulating": Pair(
        lambda m: export.Accumulated(export.Sgd(0.01, momentum=0.9), every=2),
        lambda m: Accumulating(trained(m), 0.01, momentum=0.9),
    ),
    "lion": Pair(
        lambda m: export.Lion(1e-4, (0.9, 0.99)), lambda m: Lion(trained(m), 1e-4, (0.9, 0.99))
    ),
}


Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Any]


@dataclass(frozen=True)
class TrainStep:
    """One step as its author writes it.

    ``optimizer`` is a name of :data:`optimizers.OPTIMIZERS`. ``dynamic`` is the exporter's; None
    means that axis 0 of every batch entry is the batch. ``predict`` is the exporter's, for losses
    that a prediction cannot compute: with gradients of their own, or writes.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    optimizer: str = "adam"
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    predict: Loss | None = None

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The named axes."""
        if self.dynamic is None:
            return {name: {0: "batch"} for name, tensor in self.batch.items() if tensor.dim()}
        return {name: dict(axes) for name, axes in self.dynamic.items()}


@dataclass(frozen=True)
class Subject:
    """A row of the table. ``package``: the module it comes from, empty where torch is enough."""

    name: str
    kind: str
    package: str
    write: Callable[[], TrainStep]

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return bool(self.package) and importlib.util.find_spec(self.package) is None

    def step(self, seed: int = 0) -> TrainStep:
        """The train step anew, with the same weights and batch for the same seed."""
        torch.manual_seed(seed)
        return self.write()


@dataclass
class Kind:
    """Subjects of one kind; ``add`` is the decorator that lists one."""

    name: str
    subjects: list[Subject] = field(default_factory=list)

    def add(
        self, name: str, package: str = ""
    ) -> Callable[[Callable[[], TrainStep]], Callable[[], TrainStep]]:
        """Lists the function that writes a train step."""

        def listed(write: Callable[[], TrainStep]) -> Callable[[], TrainStep]:
            self.subjects.append(Subject(name, self.name, package, write))
            return write

        return listed
