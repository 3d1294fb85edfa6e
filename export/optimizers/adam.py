"""Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from export.optimizers.base import OptimizerUpdate, StateSpec, Tensors, require


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) with decoupled weight decay (AdamW).

    Equal to ``torch.optim.AdamW``, and to ``torch.optim.Adam`` where ``weight_decay`` is 0. The
    state holds m / (1 - beta1) and v / (1 - beta2), which takes two passes fewer over each tensor.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr >= 0, f"lr is {self.lr}; it must be at least 0")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas are {self.betas}; expected two numbers in [0, 1)",
        )
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")
        require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}; at least 0")

    @property
    def name(self) -> str:
        return "adam"

    def settings(self) -> dict[str, object]:
        return {"betas": list(self.betas), "eps": self.eps, "weight_decay": self.weight_decay}

    def hyper(self) -> dict[str, float]:
        return {"lr": self.lr}

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("m", guarded=False), StateSpec("v"))

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        beta1, beta2 = self.betas
        # In double: 1 - 0.999^t at t = 1 has only four exact digits in float32.
        count = (step + 1).to(torch.float64)
        dtype = parameters[0].dtype
        # lr * m^ / (sqrt(v^) + eps), with both bias corrections and the state's scales in scalars.
        root = torch.sqrt((1 - torch.pow(beta2, count)) / (1 - beta2))
        rate = hyper["lr"].to(torch.float64) * (1 - beta1) / (1 - torch.pow(beta1, count))
        size = (rate * root).to(dtype)
        eps = (self.eps * root).to(dtype)
        shrink = 1 - hyper["lr"] * self.weight_decay
        moved, first, second = [], [], []
        for p, g, m, v in zip(parameters, gradients, state["m"], state["v"], strict=True):
            m = m * beta1 + g
            v = v * beta2 + g * g
            if self.weight_decay:
                p = p * shrink
            moved.append(p - (m * size) / (torch.sqrt(v) + eps))
            first.append(m)
            second.append(v)
        return OptimizerUpdate(moved, {"m": first, "v": second})
