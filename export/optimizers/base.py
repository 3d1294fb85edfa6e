"""What an optimizer is, and two of them: pure functions on tensors, with declared state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class StateSpec:
    """One kind of optimizer state.

    With ``per_parameter`` there is one tensor for each parameter state tensor, of its shape behind
    the ``lead`` axes (a history of q gradients has lead (q,)); without, one tensor of shape
    ``lead``. All start at zero. ``guarded=False`` leaves it out of the check for NaN and infinity;
    right only where a non-finite value in it always makes the new parameters non-finite too.
    """

    name: str
    per_parameter: bool = True
    lead: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    guarded: bool = True


@dataclass(frozen=True)
class OptimizerUpdate:
    """What one step gives: new parameters, and new state in the same layout as it came."""

    parameters: list[torch.Tensor]
    state: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Optimizer(Protocol):
    """An optimizer that can be part of a train-step graph.

    ``update`` is traced once with torch operations on whole state tensors: ``parameters`` and
    ``gradients`` are equally long lists of float32 tensors of equal shapes (small parameters
    packed into one flat vector); ``state[name]`` has one tensor a parameter, or a single one for
    shared state; ``step`` is the int64 scalar count of finished steps; ``hyper`` maps run-time
    inputs to float32 scalars.
    """

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, object]:
        """Fixed settings, for the manifest (JSON values)."""
        ...

    def hyper(self) -> dict[str, float]:
        """Run-time inputs and their defaults; the learning rate is always one."""
        ...

    def state(self) -> tuple[StateSpec, ...]:
        """The state it keeps."""
        ...

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        """One step."""
        ...


def require(condition: bool, message: str) -> None:
    """Refuse a setting."""
    if not condition:
        raise ValueError(message)


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


@dataclass(frozen=True)
class Sgd:
    """w <- w - lr * (m + weight_decay * w), m <- momentum * m + g (m = g without momentum).

    With ``momentum`` = 0 or ``weight_decay`` = 0 this is ``torch.optim.SGD``. With both, torch adds
    the decay to the gradient before the momentum; here it is decoupled, as in SGDW (Loshchilov and
    Hutter 2019, algorithm 1).
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.lr >= 0, f"lr is {self.lr}; it must be at least 0")
        require(0 <= self.momentum < 1, f"momentum is {self.momentum}; expected 0 <= momentum < 1")
        require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}; at least 0")

    @property
    def name(self) -> str:
        return "sgd"

    def settings(self) -> dict[str, object]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay}

    def hyper(self) -> dict[str, float]:
        return {"lr": self.lr}

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", guarded=False),) if self.momentum else ()

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        lr = hyper["lr"]
        moved: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            direction = gradient
            if self.momentum:
                direction = state["momentum"][index] * self.momentum + gradient
                momenta.append(direction)
            if self.weight_decay:
                direction = direction + parameter * self.weight_decay
            moved.append(parameter - lr * direction)
        return OptimizerUpdate(moved, {"momentum": momenta} if self.momentum else {})
