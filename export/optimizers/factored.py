"""Adafactor: a matrix's squared gradients as one number a row and one a column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from export.layout import LayoutSlot
from export.optimizers.protocol import (
    Delegated,
    Described,
    OptimizerUpdate,
    StateSpec,
    Tensors,
    dot,
    require,
    require_rate,
)


@dataclass(frozen=True)
class Adafactor(Described):
    """``torch.optim.Adafactor``, every setting of it (Shazeer and Stern 2018).

    The variance of a matrix's element is row * column / mean of rows; a vector's is its own. Steps
    are as long as max(eps2, root mean square of w) * min(lr, 1 / sqrt(t)), and shorter where the
    update's root mean square is above ``d``. ``eps[0]`` is float32's if None. For parameters of
    fixed sizes.
    """

    per_tensor: ClassVar[bool] = True

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rate(self.lr, self.weight_decay)
        require(self.beta2_decay <= 0, f"beta2_decay is {self.beta2_decay}; it must be at most 0")
        require(
            len(self.eps) == 2 and all(each is None or each >= 0 for each in self.eps),
            f"eps is {self.eps}; expected two numbers of at least 0",
        )
        require(self.d >= 1, f"d is {self.d}; it must be at least 1")

    def state(self) -> tuple[StateSpec, ...]:
        """None before it is bound to parameters, whose shapes it depends on."""
        return ()

    def bound(self, slots: Sequence[LayoutSlot]) -> _BoundAdafactor:
        """The same for these parameters; ValueError for one with a free size."""
        for slot in slots:
            require(
                all(isinstance(size, int) for size in slot.shape),
                f"Adafactor trains parameters of fixed sizes, not {slot.name!r} of shape "
                f"{list(slot.shape)}: give it a group with another optimizer",
            )
        return _BoundAdafactor(self, tuple(slots))

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        raise NotImplementedError("bound to parameters first")

    def moved(
        self,
        p: torch.Tensor,
        g: torch.Tensor,
        variance: torch.Tensor,
        lr: torch.Tensor,
        count: torch.Tensor,
    ) -> torch.Tensor:
        """The parameter after a step; ``count``: steps with this one, float64."""
        least = _least(self.eps[0])
        update = g * torch.rsqrt(torch.clamp(variance, min=least * least))
        root = math.sqrt(p.numel())
        rate = torch.minimum(lr.to(torch.float64), torch.rsqrt(count))
        length = torch.clamp(_norm(p) / root, min=self.eps[1])
        size = rate * length / torch.clamp(_norm(update) / (root * self.d), min=1.0)
        if self.weight_decay:
            p = p * (1 - lr * self.weight_decay)
        return p - update * size.to(p.dtype)


def _least(eps: float | None) -> float:
    return torch.finfo(torch.float32).eps if eps is None else eps


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(dot([x], [x]).to(torch.float64))


@dataclass(frozen=True)
class _BoundAdafactor(Delegated):
    """Adafactor with the parameters that it trains, one after the other."""

    optimizer: Adafactor
    slots: tuple[LayoutSlot, ...]

    def state(self) -> tuple[StateSpec, ...]:
        found = []
        for slot in self.slots:
            shape = tuple(int(size) for size in slot.shape)
            shapes = {"squares": shape}
            if len(shape) > 1:
                lead = shape[:-2]
                shapes = {"rows": (*lead, shape[-2], 1), "columns": (*lead, 1, shape[-1])}
            for kind, lead in shapes.items():
                found.append(StateSpec(f"{kind}.{slot.name}", per_parameter=False, lead=lead))
        return tuple(found)

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        mine, count = self.optimizer, (step + 1).to(torch.float64)
        share = torch.pow(count, mine.beta2_decay).to(parameters[0].dtype)
        moved, new = [], {}
        for slot, p, given in zip(self.slots, parameters, gradients, strict=True):
            g = -given if mine.maximize else given

            def averaged(kind: str, now: torch.Tensor, slot: LayoutSlot = slot) -> torch.Tensor:
                name = f"{kind}.{slot.name}"
                held = state[name][0] + (now - state[name][0]) * share
                new[name] = [held]
                return held

            squares = g * g
            if g.dim() > 1:
                rows = averaged("rows", squares.mean(-1, keepdim=True))
                columns = averaged("columns", squares.mean(-2, keepdim=True))
                mean = torch.clamp(rows.mean(-2, keepdim=True), min=_least(mine.eps[0]))
                variance = rows * columns / mean
            else:
                variance = averaged("squares", squares)
            moved.append(mine.moved(p, g, variance, hyper["lr"], count))
        return OptimizerUpdate(moved, new)
