"""Optimizers that torch does not have, tensor by tensor, as they were published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from export.optimizers.protocol import (
    EachTensor,
    StateSpec,
    bias_correction,
    dot,
    require,
    require_rate,
)

Held = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SgdW(EachTensor):
    """SGD with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 1, at the rate lr).

    m <- momentum * m + g; w <- w - lr * (m + weight_decay * w).
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", guarded=False),)

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        m = held["momentum"] * self.momentum + g
        return p - scalars["lr"] * (m + p * self.weight_decay), {"momentum": m}


@dataclass(frozen=True)
class Lion(EachTensor):
    """Lion (Chen et al. 2023, Symbolic discovery of optimization algorithms, algorithm 2).

    u = sign(beta1 * m + (1 - beta1) * g); w <- w - lr * (u + weight_decay * w);
    m <- beta2 * m + (1 - beta2) * g.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        _require_betas(self.betas)

    def state(self) -> tuple[StateSpec, ...]:
        # Guarded: the sign of infinity is finite.
        return (StateSpec("m"),)

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        beta1, beta2 = self.betas
        m = held["m"]
        u = torch.sign(m * beta1 + g * (1 - beta1))
        return p - scalars["lr"] * (u + p * self.weight_decay), {"m": m * beta2 + g * (1 - beta2)}


@dataclass(frozen=True)
class Lamb(EachTensor):
    """LAMB (You et al. 2020, Large batch optimization for deep learning, algorithm 2).

    u = m^ / (sqrt(v^) + eps) + weight_decay * w; w <- w - lr * |w| / |u| * u, with the norms of
    each parameter by itself, and 1 for their ratio where either is 0.
    """

    per_tensor: ClassVar[bool] = True

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        _require_betas(self.betas)
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")

    def state(self) -> tuple[StateSpec, ...]:
        # m / (1 - beta1) and v / (1 - beta2): two passes fewer a tensor.
        return (StateSpec("m", guarded=False), StateSpec("v"))

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """m^ / (sqrt(v^) + eps) is (m * size) / (sqrt(v) + eps)."""
        beta1, beta2 = self.betas
        root = torch.sqrt(bias_correction(beta2, step + 1) / (1 - beta2))
        size = root * (1 - beta1) / bias_correction(beta1, step + 1)
        return {"lr": hyper["lr"], "size": size.to(dtype), "eps": (self.eps * root).to(dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        new = {"m": held["m"] * self.betas[0] + g, "v": held["v"] * self.betas[1] + g * g}
        u = (new["m"] * scalars["size"]) / (torch.sqrt(new["v"]) + scalars["eps"])
        u = u + p * self.weight_decay
        weight, length = torch.sqrt(dot([p], [p])), torch.sqrt(dot([u], [u]))
        known = (weight > 0) & (length > 0)
        trust = torch.where(known, weight / torch.where(known, length, 1.0), 1.0)
        return p - u * (scalars["lr"] * trust), new


def _require_betas(betas: tuple[float, ...]) -> None:
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"betas are {betas}; expected two numbers in [0, 1)",
    )
