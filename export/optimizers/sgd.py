"""Stochastic gradient descent with momentum and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from export.optimizers.base import OptimizerUpdate, StateSpec, Tensors, require


@dataclass(frozen=True)
class Sgd:
    """w <- w - lr * (m + weight_decay * w), m <- momentum * m + g (m = g without momentum).

    With ``momentum`` = 0 or ``weight_decay`` = 0 this is ``torch.optim.SGD``. With both, torch adds
    the decay to the gradient before the momentum; here it is decoupled, as in SGDW (Loshchilov and
    Hutter 2019, algorithm 1).
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr >= 0, f"lr is {self.lr}; it must be at least 0")
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")
        require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}; at least 0")

    @property
    def name(self) -> str:
        return "sgd"

    def settings(self) -> dict[str, object]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay}

    def hyper(self) -> dict[str, float]:
        return {"lr": self.lr}

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", guarded=False),) if self.momentum else ()

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        lr = hyper["lr"]
        moved: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            direction = gradient
            if self.momentum:
                direction = state["momentum"][index] * self.momentum + gradient
                momenta.append(direction)
            if self.weight_decay:
                direction = direction + parameter * self.weight_decay
            moved.append(parameter - lr * direction)
        return OptimizerUpdate(moved, {"momentum": momenta} if self.momentum else {})
