"""Optimizers that torch does not have, as its own are written: recorded from their steps, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.optimizers.protocol import require


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
