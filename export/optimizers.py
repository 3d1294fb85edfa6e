"""What an optimizer is, and three of them: pure functions on tensors, with declared state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

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


class _Described:
    """Names itself, and its fields: the run-time ``inputs``, and the settings, all others."""

    inputs: ClassVar[tuple[str, ...]] = ("lr",)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def settings(self) -> dict[str, object]:
        values = {key: value for key, value in vars(self).items() if key not in self.inputs}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def hyper(self) -> dict[str, float]:
        return {key: vars(self)[key] for key in self.inputs}


@dataclass(frozen=True)
class Adam(_Described):
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
class Sgd(_Described):
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


# AFD's segmented adaptive optimizer: adaptive steps that turn into SGD by themselves.

SGD_SHARE = 0.5
"""cos 60 degrees: the share of the estimated rate that SGD steps take (section 2.5 (2))."""


@dataclass(frozen=True)
class Segmented(_Described):
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
        require(self.lr >= 0, f"lr is {self.lr}; it must be at least 0")
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
        square = size * _dot(directions, directions)
        along = _dot(directions, gradients)
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


def _dot(left: Tensors, right: Tensors) -> torch.Tensor:
    """In double: the first steps' squares are all close to 1, and a long float32 sum of nearly
    equal terms rounds to one side each time (1e-5 off at 50,000 elements)."""
    parts = [(a * b).to(torch.float64).sum() for a, b in zip(left, right, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(left[0].dtype)
