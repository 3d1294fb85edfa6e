"""Optimizers that divide each element of the step by the size of its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from export.optimizers.momentum import Held, coupled, require_betas
from export.optimizers.protocol import (
    EachTensor,
    StateSpec,
    bias_correction,
    dot,
    require,
    require_rate,
)


class _Moments(EachTensor):
    """Adam's moments, held as m / (1 - beta1) and v / (1 - beta2): two passes fewer a tensor."""

    betas: tuple[float, float]
    eps: float

    def __post_init__(self) -> None:
        settings = vars(self)
        require_rate(settings["lr"], settings["weight_decay"])
        require_betas(self.betas)
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("m", guarded=False), StateSpec("v"))

    def _rates(
        self, step: torch.Tensor, rate: torch.Tensor, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Scalars of rate * m^ / (sqrt(v^) + eps) = (m * size) / (sqrt(v) + eps)."""
        beta1, beta2 = self.betas
        root = torch.sqrt(bias_correction(beta2, step + 1) / (1 - beta2))
        first = rate.to(torch.float64) * (1 - beta1) / bias_correction(beta1, step + 1)
        return {"size": (first * root).to(dtype), "eps": (self.eps * root).to(dtype)}


@dataclass(frozen=True)
class Adam(_Moments):
    """``torch.optim.Adam``, every setting of it (Kingma and Ba 2015, algorithm 1).

    ``weight_decay`` is a term of the gradient, which the step's size is divided by; for decay
    that is not, see :class:`AdamW`. ``amsgrad``: the largest second moment so far (Reddi et al.
    2018).
    """

    decoupled: ClassVar[bool] = False

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def state(self) -> tuple[StateSpec, ...]:
        largest = (StateSpec("v_max", guarded=False),) if self.amsgrad else ()
        return (*super().state(), *largest)

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        found = self._rates(step, hyper["lr"], dtype)
        if self.decoupled and self.weight_decay:
            found["shrink"] = 1 - hyper["lr"] * self.weight_decay
        return found

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, 0.0 if self.decoupled else self.weight_decay, self.maximize)
        new = {
            "m": held["m"] * self.betas[0] + g,
            "v": held["v"] * self.betas[1] + g * g,
        }
        if "shrink" in scalars:
            p = p * scalars["shrink"]
        size = new["v"]
        if self.amsgrad:
            size = new["v_max"] = torch.maximum(held["v_max"], size)
        return p - (new["m"] * scalars["size"]) / (torch.sqrt(size) + scalars["eps"]), new


@dataclass(frozen=True)
class AdamW(Adam):
    """``torch.optim.AdamW``: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    decoupled: ClassVar[bool] = True

    weight_decay: float = 0.01


@dataclass(frozen=True)
class Lamb(_Moments):
    """LAMB (You et al. 2020, Large batch optimization for deep learning, algorithm 2).

    u = m^ / (sqrt(v^) + eps) + weight_decay * w; w <- w - lr * |w| / |u| * u, with the norms of
    each parameter by itself, and 1 for their ratio where either is 0.
    """

    per_tensor: ClassVar[bool] = True

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        return {"lr": hyper["lr"], **self._rates(step, torch.ones_like(hyper["lr"]), dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        m = held["m"] * self.betas[0] + g
        v = held["v"] * self.betas[1] + g * g
        u = (m * scalars["size"]) / (torch.sqrt(v) + scalars["eps"])
        u = coupled(p, u, self.weight_decay)
        weight, length = torch.sqrt(dot([p], [p])), torch.sqrt(dot([u], [u]))
        known = (weight > 0) & (length > 0)
        trust = torch.where(known, weight / torch.where(known, length, 1.0), 1.0)
        return p - u * (scalars["lr"] * trust), {"m": m, "v": v}


@dataclass(frozen=True)
class RMSprop(EachTensor):
    """``torch.optim.RMSprop``, every setting of it (Hinton 2012; centered: Graves 2013).

    d = g + weight_decay * w; v <- alpha * v + (1 - alpha) * d^2; u = d / (sqrt(v) + eps), with
    ``centered`` v less the squared mean of d; w <- w - lr * u, or along momentum * m + u.
    The state holds v / (1 - alpha), and the mean so, too.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(0 <= self.alpha < 1, f"alpha is {self.alpha}; expected 0 <= alpha < 1")
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")

    def state(self) -> tuple[StateSpec, ...]:
        return (
            StateSpec("v"),
            *((StateSpec("mean", guarded=False),) if self.centered else ()),
            *((StateSpec("momentum", guarded=False),) if self.momentum else ()),
        )

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, self.weight_decay, self.maximize)
        unit = math.sqrt(1 - self.alpha)
        new = {"v": held["v"] * self.alpha + g * g}
        size = new["v"]
        if self.centered:
            new["mean"] = mean = held["mean"] * self.alpha + g
            # Rounding may fall below 0 where all gradients are equal; torch makes NaN of that.
            size = torch.clamp(size - mean * mean * (1 - self.alpha), min=0.0)
        u = g / (torch.sqrt(size) + self.eps / unit)
        if self.momentum:
            new["momentum"] = u = held["momentum"] * self.momentum + u
        return p - u * (scalars["lr"] * (1 / unit)), new


@dataclass(frozen=True)
class Adagrad(EachTensor):
    """``torch.optim.Adagrad``, every setting of it (Duchi, Hazan and Singer 2011).

    d = g + weight_decay * w; s <- s + d^2; w <- w - lr / (1 + t * lr_decay) * d / (sqrt(s) + eps)
    with t finished steps. The state holds s less its initial value.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(self.lr_decay >= 0, f"lr_decay is {self.lr_decay}; it must be at least 0")
        start = self.initial_accumulator_value
        require(start >= 0, f"initial_accumulator_value is {start}; it must be at least 0")
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("sum"),)

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        if not self.lr_decay:
            return hyper
        lr = hyper["lr"].to(torch.float64) / (1 + step.to(torch.float64) * self.lr_decay)
        return {"lr": lr.to(dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, self.weight_decay, self.maximize)
        size = total = held["sum"] + g * g
        if self.initial_accumulator_value:
            size = total + self.initial_accumulator_value
        return p - (g * scalars["lr"]) / (torch.sqrt(size) + self.eps), {"sum": total}


@dataclass(frozen=True)
class Adadelta(EachTensor):
    """``torch.optim.Adadelta``, every setting of it (Zeiler 2012, algorithm 1).

    d = g + weight_decay * w; v <- rho * v + (1 - rho) * d^2; u = sqrt(a + eps) / sqrt(v + eps) * d;
    a <- rho * a + (1 - rho) * u^2; w <- w - lr * u.
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(0 <= self.rho <= 1, f"rho is {self.rho}; expected 0 <= rho <= 1")
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("v"), StateSpec("steps"))

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, self.weight_decay, self.maximize)
        v = held["v"] * self.rho + g * g * (1 - self.rho)
        u = torch.sqrt(held["steps"] + self.eps) / torch.sqrt(v + self.eps) * g
        steps = held["steps"] * self.rho + u * u * (1 - self.rho)
        return p - scalars["lr"] * u, {"v": v, "steps": steps}
