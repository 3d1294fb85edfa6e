"""Learning rates that change with the step: what the base rate is multiplied by.

Each is ``torch.optim.lr_scheduler``'s of the same name, with ``scheduler.step()`` after each step
of the optimizer; at step 0 torch's scheduler has just been made.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from export.optimizers.protocol import Described, require, turns


class Schedule(Protocol):
    """A function of the count of finished steps; ``turns()`` may name steps, as an optimizer's."""

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, object]:
        """Its settings, for the manifest (JSON values)."""
        ...

    def factor(self, step: Tensor) -> Tensor:
        """What the base rate is multiplied by: a float64 scalar of an int64 scalar."""
        ...


class _Described(Described):
    inputs = ()


def _require_length(total_iters: int) -> None:
    require(
        isinstance(total_iters, int) and total_iters >= 1,
        f"total_iters is {total_iters}; expected an integer of at least 1",
    )


@dataclass(frozen=True)
class Constant(_Described):
    """``ConstantLR``: ``value`` before ``total_iters`` steps, then 1."""

    value: float = 1 / 3
    total_iters: int = 5

    def __post_init__(self) -> None:
        _require_length(self.total_iters)
        require(self.value >= 0, f"value is {self.value}; it must be at least 0")

    def turns(self) -> set[int]:
        return {self.total_iters}

    def factor(self, step: Tensor) -> Tensor:
        return self.value + (1 - self.value) * (step >= self.total_iters).to(torch.float64)


@dataclass(frozen=True)
class Linear(_Described):
    """``LinearLR``: in a line from ``start_factor`` to ``end_factor``, then there. A warm-up."""

    start_factor: float = 1 / 3
    end_factor: float = 1.0
    total_iters: int = 5

    def __post_init__(self) -> None:
        _require_length(self.total_iters)
        require(
            self.start_factor >= 0 and self.end_factor >= 0,
            f"the factors are {self.start_factor} and {self.end_factor}; both at least 0",
        )

    def turns(self) -> set[int]:
        return {self.total_iters // 2, self.total_iters + 1}

    def factor(self, step: Tensor) -> Tensor:
        share = _share(step, self.total_iters)
        return self.start_factor + (self.end_factor - self.start_factor) * share


@dataclass(frozen=True)
class Cosine(_Described):
    """``CosineAnnealingLR`` with T_max = ``total_iters`` and eta_min = ``end_factor`` * lr.

    Behind ``total_iters`` it rises again, as torch's does.
    """

    total_iters: int
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        _require_length(self.total_iters)
        require(self.end_factor >= 0, f"end_factor is {self.end_factor}; it must be at least 0")

    def turns(self) -> set[int]:
        return {self.total_iters // 2}

    def factor(self, step: Tensor) -> Tensor:
        wave = torch.cos(step.to(torch.float64) * (math.pi / self.total_iters))
        return self.end_factor + (1 - self.end_factor) * ((1 + wave) / 2)


@dataclass(frozen=True)
class Polynomial(_Described):
    """``PolynomialLR``: (1 - t / total_iters)^power, then 0."""

    total_iters: int = 5
    power: float = 1.0

    def __post_init__(self) -> None:
        _require_length(self.total_iters)
        require(self.power > 0, f"power is {self.power}; it must be above 0")

    def turns(self) -> set[int]:
        return {self.total_iters // 2}

    def factor(self, step: Tensor) -> Tensor:
        return torch.pow(1 - _share(step, self.total_iters), self.power)


@dataclass(frozen=True)
class Exponential(_Described):
    """``ExponentialLR``: gamma^t."""

    gamma: float

    def __post_init__(self) -> None:
        require(self.gamma > 0, f"gamma is {self.gamma}; it must be above 0")

    def factor(self, step: Tensor) -> Tensor:
        return torch.pow(self.gamma, step.to(torch.float64))


@dataclass(frozen=True)
class Step(_Described):
    """``StepLR``: gamma^(t // step_size)."""

    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(
            isinstance(self.step_size, int) and self.step_size >= 1,
            f"step_size is {self.step_size}; expected an integer of at least 1",
        )
        require(self.gamma > 0, f"gamma is {self.gamma}; it must be above 0")

    def turns(self) -> set[int]:
        return {self.step_size}

    def factor(self, step: Tensor) -> Tensor:
        times = torch.div(step, self.step_size, rounding_mode="floor")
        return torch.pow(self.gamma, times.to(torch.float64))


@dataclass(frozen=True)
class MultiStep(_Described):
    """``MultiStepLR``: gamma to the number of ``milestones`` that are behind."""

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _require_rising(self.milestones)
        require(self.gamma > 0, f"gamma is {self.gamma}; it must be above 0")

    def turns(self) -> set[int]:
        return set(self.milestones)

    def factor(self, step: Tensor) -> Tensor:
        behind = step * 0
        for milestone in self.milestones:
            behind = behind + (step >= milestone).to(step.dtype)
        return torch.pow(self.gamma, behind.to(torch.float64))


@dataclass(frozen=True)
class OneCycle(_Described):
    """``OneCycleLR(cycle_momentum=False)`` with max_lr = lr: up to it, and down to almost nothing.

    Behind ``total_steps``, where torch raises, it stays at its last value. Momentum and betas stay
    what they are.
    """

    total_steps: int
    pct_start: float = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        require(
            isinstance(self.total_steps, int) and self.total_steps >= 2,
            f"total_steps is {self.total_steps}; expected an integer of at least 2",
        )
        first = self.pct_start * self.total_steps
        require(
            0 <= self.pct_start <= 1 and first != 1,
            f"pct_start is {self.pct_start}; expected 0 to 1, and not one step exactly",
        )
        require(
            self.anneal_strategy in ("cos", "linear"),
            f"anneal_strategy is {self.anneal_strategy!r}; expected cos or linear",
        )
        require(self.div_factor > 0 and self.final_div_factor > 0, "the divisors are above 0")

    def turns(self) -> set[int]:
        ends = [0, *(int(end) for end, _, _ in self._phases())]
        return {max(0, (a + b) // 2) for a, b in itertools.pairwise(ends)}

    def _phases(self) -> list[tuple[float, float, float]]:
        """Last step of each phase, and the factors at its start and at its end."""
        low = 1 / self.div_factor
        least = low / self.final_div_factor
        rise = self.pct_start * self.total_steps - 1
        last = float(self.total_steps - 1)
        if self.three_phase:
            return [(rise, low, 1.0), (2 * rise, 1.0, low), (last, low, least)]
        return [(rise, low, 1.0), (last, 1.0, least)]

    def factor(self, step: Tensor) -> Tensor:
        at = torch.clamp(step, max=self.total_steps - 1).to(torch.float64)
        found = None
        begin = 0.0
        pieces: list[tuple[float, Tensor]] = []
        for end, low, high in self._phases():
            if end > begin:
                share = (at - begin) / (end - begin)
                if self.anneal_strategy == "cos":
                    share = (1 - torch.cos(share * math.pi)) / 2
                pieces.append((end, low + (high - low) * share))
            begin = end
        for end, piece in reversed(pieces):
            found = piece if found is None else torch.where(at <= end, piece, found)
        assert found is not None
        return found


@dataclass(frozen=True)
class Sequential(_Described):
    """``SequentialLR``: each of ``schedules`` from its milestone on, counting from 0 there.

    A warm-up of 100 steps and a cosine of 900: ``Sequential((Linear(0.01, total_iters=100),
    Cosine(900)), milestones=(100,))``.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            len(self.schedules) == len(self.milestones) + 1,
            f"{len(self.schedules)} schedules take {len(self.schedules) - 1} milestones, not "
            f"{len(self.milestones)}",
        )
        _require_rising(self.milestones)

    def settings(self) -> dict[str, object]:
        found: dict[str, object] = {"milestones": list(self.milestones)}
        for at, schedule in enumerate(self.schedules, start=1):
            found[str(at)] = schedule.name
            found.update({f"{at}.{key}": value for key, value in schedule.settings().items()})
        return found

    def turns(self) -> set[int]:
        begins = (0, *self.milestones)
        pairs = zip(self.schedules, begins, strict=True)
        return {begin + turn for schedule, begin in pairs for turn in {0, *turns(schedule)}}

    def factor(self, step: Tensor) -> Tensor:
        found = self.schedules[0].factor(step)
        for schedule, milestone in zip(self.schedules[1:], self.milestones, strict=True):
            later = schedule.factor(torch.clamp(step - milestone, min=0))
            found = torch.where(step >= milestone, later, found)
        return found


def _share(step: Tensor, total_iters: int) -> Tensor:
    """How much of ``total_iters`` is behind, at most 1."""
    return torch.clamp(step, max=total_iters).to(torch.float64) / total_iters


def _require_rising(milestones: tuple[int, ...]) -> None:
    require(
        all(isinstance(each, int) and each >= 1 for each in milestones)
        and list(milestones) == sorted(set(milestones)),
        f"milestones are {list(milestones)}; expected rising integers from 1 on",
    )
