"""Optimizers that follow the gradient, or its sign, with momentum."""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class ASGD(EachTensor):
    """``torch.optim.ASGD``, every setting of it (Polyak and Juditsky 1992).

    eta = lr / (1 + lambd * lr * t)^alpha; w <- w * (1 - lambd * eta) - eta * d, after t steps. The
    state ``average`` holds torch's ``ax``: the mean of the parameters since step ``t0``.
    """

    lr: float = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("average", guarded=False),)

    def turns(self) -> set[int]:
        return {math.ceil(self.t0) + 2} if self.t0 < _LATEST_AVERAGE else set()

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        lr, count = hyper["lr"].to(torch.float64), step.to(torch.float64)
        eta = lr / torch.pow(1 + lr * (count * self.lambd), self.alpha)
        share = 1 / torch.clamp(count - self.t0, min=1.0)
        return {"eta": eta.to(dtype), "share": share.to(dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        d = coupled(p, g, self.weight_decay, self.maximize)
        p = p * (1 - self.lambd * scalars["eta"]) - scalars["eta"] * d
        moved = held["average"] + (p - held["average"]) * scalars["share"]
        return p, {"average": torch.where(scalars["share"] == 1, p, moved)}


# Verification looks at a step behind the start of an average that begins before this one.
_LATEST_AVERAGE = 100_000


@dataclass(frozen=True)
class Rprop(EachTensor):
    """``torch.optim.Rprop``, every setting of it (Riedmiller and Braun 1993), for whole batches.

    Each element has a step of its own, ``lr`` at first, times ``etas[1]`` where the gradient keeps
    its sign and times ``etas[0]``, without moving, where it changes it, within ``step_sizes``.
    """

    lr: float = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50)
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr)
        require(
            len(self.etas) == 2 and 0 < self.etas[0] < 1 < self.etas[1],
            f"etas are {self.etas}; expected a number below 1 and one above",
        )
        require(
            len(self.step_sizes) == 2 and 0 <= self.step_sizes[0] <= self.step_sizes[1],
            f"step_sizes are {self.step_sizes}; expected the least and the largest",
        )

    def state(self) -> tuple[StateSpec, ...]:
        # Guarded: the sign of infinity is finite.
        return (StateSpec("gradient"), StateSpec("size"))

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        return {**hyper, "begins": step == 0}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, 0.0, self.maximize)
        turned = g * held["gradient"]
        size = torch.where(scalars["begins"], scalars["lr"], held["size"])
        shorter, longer = (size * eta for eta in self.etas)
        size = torch.where(turned > 0, longer, torch.where(turned < 0, shorter, size))
        size = torch.clamp(size, *self.step_sizes)
        g = torch.where(turned < 0, 0.0, g)
        return p - torch.sign(g) * size, {"gradient": g, "size": size}


def require_betas(betas: tuple[float, ...]) -> None:
    """Refuse a pair of betas outside [0, 1)."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"betas are {betas}; expected two numbers in [0, 1)",
    )
