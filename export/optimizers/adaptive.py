"""Optimizers that divide each element of the step by the size of its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from export.optimizers.momentum import Held, coupled, require_betas
from export.optimizers.protocol import (
    EachTensor,
    OptimizerUpdate,
    StateSpec,
    Tensors,
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

    def _moved(self, g: torch.Tensor, held: Held) -> dict[str, torch.Tensor]:
        """Both moments after a step."""
        return {"m": held["m"] * self.betas[0] + g, "v": held["v"] * self.betas[1] + g * g}

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
        new = self._moved(g, held)
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
class NAdam(_Moments):
    """``torch.optim.NAdam``, every setting of it (Dozat 2016).

    mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2); w <- w - lr * ((1 - mu_t) / (1 - M_t) * g +
    mu_t+1 / (1 - M_t+1) * m) / (sqrt(v^) + eps), with M_t the product of mu_1 to mu_t.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        decay = self.momentum_decay
        require(decay >= 0, f"momentum_decay is {decay}; it must be at least 0")

    def state(self) -> tuple[StateSpec, ...]:
        # 1 - M_t, which starts at zero as all state does.
        return (*super().state(), StateSpec("passed", per_parameter=False))

    def _momentum(self, count: torch.Tensor) -> torch.Tensor:
        power = count.to(torch.float64) * self.momentum_decay
        return self.betas[0] * (1 - 0.5 * torch.pow(0.96, power))

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        mu, following, product = (
            self._momentum(step + 1),
            self._momentum(step + 2),
            hyper["product"],
        )
        root = torch.sqrt(bias_correction(self.betas[1], step + 1) / (1 - self.betas[1]))
        rate = hyper["lr"].to(torch.float64) * root
        found = {
            "gradient": rate * (1 - mu) / (1 - product),
            "m": rate * following * (1 - self.betas[0]) / (1 - product * following),
            "eps": self.eps * root,
            "shrink": 1 - hyper["lr"] * self.weight_decay,
        }
        return {name: value.to(dtype) for name, value in found.items()}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        apart = self.decoupled_weight_decay
        g = coupled(p, g, 0.0 if apart else self.weight_decay, self.maximize)
        if apart and self.weight_decay:
            p = p * scalars["shrink"]
        new = self._moved(g, held)
        along = g * scalars["gradient"] + new["m"] * scalars["m"]
        return p - along / (torch.sqrt(new["v"]) + scalars["eps"]), new

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Held,
    ) -> OptimizerUpdate:
        (passed,) = state["passed"]
        product = (1 - passed.to(torch.float64)) * self._momentum(step + 1)
        update = super().update(parameters, gradients, state, step, {**hyper, "product": product})
        return replace(update, state={**update.state, "passed": [(1 - product).to(passed.dtype)]})


@dataclass(frozen=True)
class RAdam(_Moments):
    """``torch.optim.RAdam``, every setting of it (Liu et al. 2020, algorithm 2).

    w <- w - lr * m^ * r_t / (sqrt(v^) + eps) once the average of squares is worth more than 5 of
    them (rho_t > 5), and w - lr * m^ before.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    def turns(self) -> set[int]:
        counts = torch.arange(1, _LATEST)
        adaptive = (self._worth(counts) > _WORTH).nonzero()
        return {int(adaptive[0])} if adaptive.numel() else set()

    def _worth(self, count: torch.Tensor) -> torch.Tensor:
        """rho_t: how many squares the average is worth."""
        beta = self.betas[1]
        count = count.to(torch.float64)
        return self._most - 2 * count * torch.pow(beta, count) / bias_correction(beta, count)

    @property
    def _most(self) -> float:
        return 2 / (1 - self.betas[1]) - 1

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        (beta1, beta2), most, count = self.betas, self._most, step + 1
        worth = self._worth(count)
        adaptive = worth > _WORTH
        shares = (worth - 4) * (worth - 2) * most / ((most - 4) * (most - 2) * worth)
        size = torch.sqrt(shares * bias_correction(beta2, count) / (1 - beta2))
        first = hyper["lr"].to(torch.float64) * (1 - beta1) / bias_correction(beta1, count)
        return {
            "adaptive": adaptive,
            "size": (first * torch.where(adaptive, size, 1.0)).to(dtype),
            "shrink": (1 - hyper["lr"] * self.weight_decay).to(dtype),
        }

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        apart = self.decoupled_weight_decay
        g = coupled(p, g, 0.0 if apart else self.weight_decay, self.maximize)
        if apart and self.weight_decay:
            p = p * scalars["shrink"]
        new = self._moved(g, held)
        divisor = torch.sqrt(new["v"]) + self.eps / math.sqrt(1 - self.betas[1])
        divisor = torch.where(scalars["adaptive"], divisor, 1.0)
        return p - (new["m"] * scalars["size"]) / divisor, new


# What RAdam's average of squares has to be worth, and where a search for that ends.
_WORTH, _LATEST = 5.0, 10_000


@dataclass(frozen=True)
class Adamax(_Moments):
    """``torch.optim.Adamax``, every setting of it (Kingma and Ba 2015, algorithm 2).

    u <- max(beta2 * u, |d| + eps); w <- w - lr * m^ / u.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("m", guarded=False), StateSpec("largest"))

    def scalars(
        self, step: torch.Tensor, hyper: Held, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        beta = self.betas[0]
        rate = hyper["lr"].to(torch.float64) * (1 - beta) / bias_correction(beta, step + 1)
        return {"size": rate.to(dtype)}

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        g = coupled(p, g, self.weight_decay, self.maximize)
        m = held["m"] * self.betas[0] + g
        largest = torch.maximum(held["largest"] * self.betas[1], torch.abs(g) + self.eps)
        return p - (m * scalars["size"]) / largest, {"m": m, "largest": largest}


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
        new = self._moved(g, held)
        u = (new["m"] * scalars["size"]) / (torch.sqrt(new["v"]) + scalars["eps"])
        u = coupled(p, u, self.weight_decay)
        weight, length = torch.sqrt(dot([p], [p])), torch.sqrt(dot([u], [u]))
        known = (weight > 0) & (length > 0)
        trust = torch.where(known, weight / torch.where(known, length, 1.0), 1.0)
        return p - u * (scalars["lr"] * trust), new


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
