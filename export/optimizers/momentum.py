"""Optimizers that follow the gradient, or its sign, with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from export.optimizers.protocol import EachTensor, StateSpec, require, require_rate

Held = Mapping[str, torch.Tensor]


def coupled(
    p: torch.Tensor, g: torch.Tensor, weight_decay: float, maximize: bool = False
) -> torch.Tensor:
    """The gradient of the loss and of weight_decay / 2 * |p|^2, as torch's optimizers take it."""
    if maximize:
        g = -g
    return g + p * weight_decay if weight_decay else g


@dataclass(frozen=True)
class Sgd(EachTensor):
    """``torch.optim.SGD``, every setting of it.

    d = g + weight_decay * w; m <- momentum * m + (1 - dampening) * d, in the first step m = d;
    w <- w - lr * m, with ``nesterov`` w - lr * (d + momentum * m).
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")
        require(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            "nesterov takes a momentum above 0 and no dampening",
        )

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", guarded=False),) if self.momentum else ()

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        if not self.dampening:
            return hyper
        share = 1 - self.dampening * (step > 0).to(torch.float64)
        return {**hyper, "share": share.to(dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        d = coupled(p, g, self.weight_decay, self.maximize)
        if not self.momentum:
            return p - scalars["lr"] * d, {}
        m = held["momentum"] * self.momentum + (d * scalars["share"] if self.dampening else d)
        along = d + m * self.momentum if self.nesterov else m
        return p - scalars["lr"] * along, {"momentum": m}


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
        return p - scalars["lr"] * coupled(p, m, self.weight_decay), {"momentum": m}


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
        require_betas(self.betas)

    def state(self) -> tuple[StateSpec, ...]:
        # Guarded: the sign of infinity is finite.
        return (StateSpec("m"),)

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        beta1, beta2 = self.betas
        m = held["m"]
        u = torch.sign(m * beta1 + g * (1 - beta1))
        return p - scalars["lr"] * coupled(p, u, self.weight_decay), {
            "m": m * beta2 + g * (1 - beta2)
        }


def require_betas(betas: tuple[float, ...]) -> None:
    """Refuse a pair of betas outside [0, 1)."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"betas are {betas}; expected two numbers in [0, 1)",
    )
