"""Optimizers that torch does not have, most of them written as its own are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export.optimizers.protocol import (
    Described,
    OptimizerUpdate,
    StateSpec,
    Tensors,
    dot,
    require,
    require_rate,
)


class _EachParameter(torch.optim.Optimizer):
    """Moves one parameter after the other, in the same way."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        betas = settings.get("betas", (0.0, 0.0))
        require(
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            f"betas are {betas}; expected two numbers in [0, 1)",
        )
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, self.state[p], group)

    def _move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class SgdW(_EachParameter):
    """SGD with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 1, at the rate lr).

    m <- momentum * m + g; w <- w - lr * (m + weight_decay * w).
    """

    def __init__(
        self, parameters: Any, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def _move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        m = state["momentum"].mul_(group["momentum"]).add_(g)
        p.sub_((m + p * group["weight_decay"]) * group["lr"])


class Lion(_EachParameter):
    """Lion (Chen et al. 2023, Symbolic discovery of optimization algorithms, algorithm 2).

    u = sign(beta1 * m + (1 - beta1) * g); w <- w - lr * (u + weight_decay * w);
    m <- beta2 * m + (1 - beta2) * g.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay)

    def _move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        u = state["m"].lerp(g, 1 - beta1).sign()
        if group["weight_decay"]:
            u = u + p * group["weight_decay"]
        p.sub_(u * group["lr"])
        state["m"].lerp_(g, 1 - beta2)


class Lamb(_EachParameter):
    """LAMB (You et al. 2020, Large batch optimization for deep learning, algorithm 2).

    u = m^ / (sqrt(v^) + eps) + weight_decay * w; w <- w - lr * |w| / |u| * u, with the norms of
    each parameter by itself, and 1 for their ratio where either is 0.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=torch.zeros(()), m=torch.zeros_like(p), v=torch.zeros_like(p))
        count = state["step"].add_(1)
        beta1, beta2 = group["betas"]
        m = state["m"].lerp_(g, 1 - beta1) / (1 - beta1**count)
        v = state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2) / (1 - beta2**count)
        u = m / (v.sqrt() + group["eps"])
        if group["weight_decay"]:
            u = u + p * group["weight_decay"]
        weight, length = p.norm(), u.norm()
        trust = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
        p.sub_(u * (group["lr"] * trust))


SGD_SHARE = 0.5
"""cos 60 degrees: the share of the estimated rate that SGD steps take (section 2.5 (2))."""


@dataclass(frozen=True)
class Segmented(Described):
    """The optimizer of AFD (papers/afd), equations 10 to 19.

    At step z, counted from 1, with gradient R_z and a window of the last q + 1 gradients (fewer at
    the start), elementwise:

        V_z = mu1 * V_{z-q} + (1 - mu1) * max(R^2 over the window)         (11, 12; V = 0 before 1)
        m_z = mean(R over the window)                                      (13: mu2 cancels)
        delta = lr * m_z / (sqrt(V_z / (1 - mu1^(floor((z-1)/q) + 1))) + eps)                (14)
        w = w - delta                                                                        (15)

    and over all parameters together, estimating the rate at which SGD would go as far:

        eta_sgd = delta'delta / delta'R, skipped where delta'R <= 0                      (17, 18)
        average_z = sigma * average_{z-1} + (1 - sigma) * eta_sgd
        eta_z = average_z / (1 - sigma^z)                  (19; as printed, it is no average)

    When z > 1 and |eta_z - eta_sgd| < xi (16), all later steps are w = w - 0.5 * eta_z * R, with
    eta_z as it was then. ``lr`` (mu3) and ``xi`` are run-time inputs; xi = 0 never switches.

    State to read on the device: ``segmented.switched_at`` int64 [], the step that switched, 0
    before; ``segmented.eta_sgd`` and ``segmented.eta`` float32 [], the last estimate and its
    average.

    In place of the window the state holds what each step needs of it: the sums and the maxima of
    the last 1, 2, ..., q gradients. Each new one is an old one joined with the new gradient, so
    none is copied and no rounding builds up: 2q + 1 passes over a tensor where the window itself
    takes 4q + 1. Dividing by a maximum makes shorter steps than Adam's at the same rate, so the
    default ``lr`` is higher. The paper gives no q; more than 1 learned no faster in our trials.
    """

    inputs = ("lr", "xi")

    lr: float = 5e-3
    window: int = 1
    mu1: float = 0.99
    sigma: float = 0.9
    xi: float = 1e-4
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_rate(self.lr)
        require(
            isinstance(self.window, int) and 1 <= self.window <= 16,
            f"window (q) is {self.window}; expected an integer from 1 to 16",
        )
        require(0 <= self.mu1 < 1, f"mu1 is {self.mu1}; expected 0 <= mu1 < 1")
        require(0 <= self.sigma < 1, f"sigma is {self.sigma}; expected 0 <= sigma < 1")
        require(self.xi >= 0, f"xi is {self.xi}; it must be at least 0")
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")

    def state(self) -> tuple[StateSpec, ...]:
        """sum_j and max_j are of the last j gradients, v_j is V of j steps ago / (1 - mu1).

        Only v_1 is guarded: an infinite square shows there, and whatever else is not finite makes
        the parameters so, too.
        """
        ages = range(1, self.window + 1)
        return (
            *(StateSpec(f"sum_{j}", guarded=False) for j in ages),
            *(StateSpec(f"max_{j}", guarded=False) for j in ages),
            *(StateSpec(f"v_{j}", guarded=j == 1) for j in ages),
            StateSpec("average", per_parameter=False),
            StateSpec("eta_sgd", per_parameter=False),
            StateSpec("eta", per_parameter=False),
            StateSpec("switched_at", per_parameter=False, dtype=torch.int64),
        )

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        new: dict[str, list[torch.Tensor]] = {spec.name: [] for spec in self.state()}
        size, eps = self._scalars(parameters[0].dtype, step, hyper["lr"])
        # delta is size * direction: the scalar is applied once, at the end.
        directions = [
            self._direction(gradient, index, state, new, eps)
            for index, gradient in enumerate(gradients)
        ]
        square = size * dot(directions, directions)
        along = dot(directions, gradients)
        switched, eta = self._rates(square, along, state, new, step, hyper["xi"])
        rate = torch.where(switched, SGD_SHARE * eta, size)
        moved = [
            p - torch.where(switched, g, d) * rate
            for p, g, d in zip(parameters, gradients, directions, strict=True)
        ]
        return OptimizerUpdate(moved, new)

    def _scalars(
        self, dtype: torch.dtype, step: torch.Tensor, lr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """delta = first * sum / (sqrt(v) + second), sum and v as the state holds them."""
        # In double: 1 - mu1^n at n = 1 has only four exact digits in float32.
        segments = torch.div(step, self.window, rounding_mode="floor") + 1
        correction = 1 - torch.pow(self.mu1, segments.to(torch.float64))
        root = torch.sqrt(correction / (1 - self.mu1))
        held = torch.clamp(step + 1, max=self.window + 1).to(torch.float64)
        size = lr.to(torch.float64) * root / held
        return size.to(dtype), (self.eps * root).to(dtype)

    def _direction(
        self,
        gradient: torch.Tensor,
        index: int,
        state: Mapping[str, list[torch.Tensor]],
        new: dict[str, list[torch.Tensor]],
        eps: torch.Tensor,
    ) -> torch.Tensor:
        q = self.window
        total, largest = gradient, gradient * gradient
        square = largest
        for j in range(1, q + 1):
            new[f"sum_{j}"].append(total)
            new[f"max_{j}"].append(largest)
            total = gradient + state[f"sum_{j}"][index]
            largest = torch.maximum(square, state[f"max_{j}"][index])
        v = state[f"v_{q}"][index] * self.mu1 + largest
        new["v_1"].append(v)
        for j in range(2, q + 1):
            new[f"v_{j}"].append(state[f"v_{j - 1}"][index].clone())
        return total / (torch.sqrt(v) + eps)

    def _rates(
        self,
        square: torch.Tensor,
        along: torch.Tensor,
        state: Mapping[str, list[torch.Tensor]],
        new: dict[str, list[torch.Tensor]],
        step: torch.Tensor,
        xi: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether this step is SGD's already, and its rate; fills in the rates' new state."""
        average, last, eta, at = (
            state[name][0] for name in ("average", "eta_sgd", "eta", "switched_at")
        )
        count = step + 1
        switched = at > 0
        positive = along > 0
        live = positive & ~switched
        now = square / torch.where(positive, along, torch.ones_like(along))
        average = torch.where(live, self.sigma * average + (1 - self.sigma) * now, average)
        correction = 1 - torch.pow(self.sigma, count.to(torch.float64))
        corrected = torch.where(switched, eta, average / correction.to(average.dtype))
        near = torch.abs(corrected - now) < xi
        new["average"] = [average]
        new["eta_sgd"] = [torch.where(live, now, last)]
        new["eta"] = [corrected]
        new["switched_at"] = [torch.where(live & near & (count > 1), count, at)]
        return switched, corrected
