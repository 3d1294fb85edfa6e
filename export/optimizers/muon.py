"""Muon: momentum made orthogonal, for the matrices of hidden layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from export.layout import LayoutSlot
from export.optimizers.momentum import Held
from export.optimizers.protocol import EachTensor, StateSpec, dot, require, require_rate

_ADJUSTMENTS = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(EachTensor):
    """``torch.optim.Muon`` (Jordan et al. 2024), with products in the parameters' own precision.

    m <- momentum * m + (1 - momentum) * g; u = Newton-Schulz of m (with ``nesterov`` of g and m in
    the same shares); w <- w * (1 - lr * weight_decay) - lr * adjusted * u. torch rounds the
    Newton-Schulz iteration to bfloat16, which devices lack: ours is the more exact one.

    For matrices of fixed sizes; biases, norms, embeddings and the last layer go to another
    optimizer by :class:`Groups`.
    """

    per_tensor: ClassVar[bool] = True

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")
        require(len(self.ns_coefficients) == 3, "ns_coefficients are three numbers")
        require(
            isinstance(self.ns_steps, int) and 1 <= self.ns_steps < 100,
            f"ns_steps is {self.ns_steps}; expected an integer from 1 to 99",
        )
        require(self.eps > 0, f"eps is {self.eps}; it must be above 0")
        require(
            self.adjust_lr_fn in (None, *_ADJUSTMENTS),
            f"adjust_lr_fn is {self.adjust_lr_fn!r}; expected one of {', '.join(_ADJUSTMENTS)}",
        )

    def bound(self, slots: Sequence[LayoutSlot]) -> Muon:
        """Itself; ValueError for a parameter that is no matrix."""
        for slot in slots:
            require(
                len(slot.shape) == 2 and all(isinstance(size, int) for size in slot.shape),
                f"Muon trains matrices of fixed sizes, not {slot.name!r} of shape "
                f"{list(slot.shape)}: give it a group, export.Groups(export.AdamW(...), "
                "export.Group(lambda name, shape: len(shape) == 2, export.Muon(...)))",
            )
        return self

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", guarded=False),)

    def one(
        self, p: torch.Tensor, g: torch.Tensor, held: Held, scalars: Held
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        m = held["momentum"] * self.momentum + g * (1 - self.momentum)
        u = g * (1 - self.momentum) + m * self.momentum if self.nesterov else m
        rows, columns = p.shape
        u = self._orthogonal(u.T).T if rows > columns else self._orthogonal(u)
        if self.weight_decay:
            p = p * (1 - scalars["lr"] * self.weight_decay)
        return p - u * (scalars["lr"] * self._adjusted(rows, columns)), {"momentum": m}

    def _orthogonal(self, u: torch.Tensor) -> torch.Tensor:
        """U S' V^T with S' near 1, of u = U S V^T."""
        a, b, c = self.ns_coefficients
        u = u / torch.clamp(torch.sqrt(dot([u], [u])), min=self.eps)
        for _ in range(self.ns_steps):
            gram = u @ u.T
            u = u * a + (gram * b + gram @ gram * c) @ u
        return u

    def _adjusted(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))
