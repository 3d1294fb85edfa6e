"""Optimizers around another one: clipping, accumulation, averages, schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from device_sdk.artifact.parts import AVERAGE_LAG
from export.axes import Shape
from export.layout import LayoutSlot
from export.optimizers.protocol import (
    Delegated,
    OptimizerUpdate,
    StateSpec,
    Tensors,
    bound,
    dot,
    packs,
    require,
    turns,
)
from export.optimizers.schedules import Schedule


@dataclass(frozen=True)
class Around(Delegated):
    """An optimizer around another: bears its name, and adds settings and state to its own."""

    def __post_init__(self) -> None:
        if self.holds_torchs:
            return
        inner = self.optimizer.settings()
        twice = sorted(set(self._own()) & set(inner))
        require(not twice, f"{', '.join(twice)} is set twice: {type(self).__name__} around itself")

    @property
    def holds_torchs(self) -> bool:
        """Whether one of torch's is inside: of ours, it becomes an equal with the model known."""
        inner: object = self.optimizer
        return isinstance(inner, torch.optim.Optimizer) or (
            isinstance(inner, Around) and inner.holds_torchs
        )

    def settings(self) -> dict[str, object]:
        return {**super().settings(), **self._own()}

    def _own(self) -> dict[str, object]:
        """Its own settings, behind its class's name."""
        own = [field.name for field in fields(self) if field.name != "optimizer"]
        label = type(self).__name__.lower()
        values = {f"{label}.{key}": getattr(self, key) for key in own}
        return {key: value for key, value in values.items() if value is not None}

    def packs(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        return packs(self.optimizer, shapes)

    def bound(self, slots: Sequence[LayoutSlot]) -> Self:
        return replace(self, optimizer=bound(self.optimizer, slots))


@dataclass(frozen=True)
class Clipped(Around):
    """Gradients that are cut before the optimizer sees them, by ``norm`` or by ``value``.

    ``norm``: scaled by norm / (|g| + 1e-6) where that is below 1, |g| over all parameters, of all
    groups (``torch.nn.utils.clip_grad_norm_``; ``kind`` 2, or ``inf`` for the largest element).
    ``value``: each element held to [-value, value] (``clip_grad_value_``).
    """

    norm: float | None = None
    value: float | None = None
    kind: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [limit for limit in (self.norm, self.value) if limit is not None]
        require(len(given) == 1, "Clipped takes norm= or value=; for both, one around the other")
        require(given[0] > 0, f"the limit is {given[0]}; it must be above 0")
        require(self.kind in (None, 2, "inf", math.inf), f"kind is {self.kind}; expected 2 or inf")
        require(self.kind is None or self.norm is not None, "kind is of a norm")
        object.__setattr__(self, "kind", "inf" if self.kind in ("inf", math.inf) else None)

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        if self.value is not None:
            cut = [torch.clamp(g, -self.value, self.value) for g in gradients]
        else:
            share = torch.clamp((self.norm or 0.0) / (self._length(gradients) + 1e-6), max=1.0)
            cut = [g * share for g in gradients]
        return self.optimizer.update(parameters, cut, state, step, hyper)

    def _length(self, gradients: Tensors) -> torch.Tensor:
        if self.kind is None:
            return torch.sqrt(dot(gradients, gradients))
        largest = gradients[0].abs().amax()
        for gradient in gradients[1:]:
            largest = torch.maximum(largest, gradient.abs().amax())
        return largest


@dataclass(frozen=True)
class Accumulated(Around):
    """Gradients of ``every`` steps make one step of the optimizer, with their mean.

    A torch loop that calls ``(loss / every).backward()`` each time and ``optimizer.step()`` each
    ``every``-th time; ``mean=False``: ``loss.backward()``, with their sum. The inner optimizer's
    ``step`` counts its own steps.
    """

    every: int
    mean: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.every, int) and self.every >= 1,
            f"every is {self.every}; expected an integer of at least 1",
        )

    def turns(self) -> set[int]:
        return {(own + 1) * self.every - 1 for own in {0, *super().turns()}}

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec("accumulated"), *super().state())

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        share = 1 / self.every if self.mean else 1.0
        total = [
            held + (g * share if share != 1 else g)
            for held, g in zip(state["accumulated"], gradients, strict=True)
        ]
        finished = torch.div(step, self.every, rounding_mode="floor")
        due = torch.remainder(step + 1, self.every) == 0
        # As numbers: onnxruntime takes several times as long to choose by a condition.
        take = due.to(total[0].dtype)
        leave = 1 - take
        update = self.optimizer.update(parameters, total, state, finished, hyper)

        def chosen(new: Tensors, old: Tensors) -> list[torch.Tensor]:
            return [
                a * take + b * leave if a.is_floating_point() else torch.where(due, a, b)
                for a, b in zip(new, old, strict=True)
            ]

        kept = {kind: chosen(held, state[kind]) for kind, held in update.state.items()}
        kept["accumulated"] = [each * leave for each in total]
        return OptimizerUpdate(chosen(update.parameters, parameters), kept)


@dataclass(frozen=True)
class Averaged(Around):
    """An exponential moving average of the parameters beside them, to predict with.

    average <- decay * average + (1 - decay) * w after each step, and the parameters themselves at
    the start: ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, updated
    once before the first step and after each. ``Trainer.averages`` holds it, and
    ``Trainer.predict(batch, averaged=True)`` uses it. The state holds average - w, so that where
    it begins anew it begins at the parameters.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.decay < 1, f"decay is {self.decay}; expected 0 <= decay < 1")

    def state(self) -> tuple[StateSpec, ...]:
        return (StateSpec(AVERAGE_LAG, guarded=False), *super().state())

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        update = self.optimizer.update(parameters, gradients, state, step, hyper)
        lags = [
            (lag + (old - new)) * self.decay
            for lag, old, new in zip(state[AVERAGE_LAG], parameters, update.parameters, strict=True)
        ]
        return OptimizerUpdate(update.parameters, {**update.state, AVERAGE_LAG: lags})


@dataclass(frozen=True)
class Scheduled(Around):
    """A learning rate that follows ``schedule``, computed on the device from ``step``.

    The run-time input ``lr`` stays: the base rate, which the schedule multiplies, for all groups.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.holds_torchs or any(_is_rate(key) for key in self.hyper()),
            "the optimizer has no run-time input lr that a schedule could change",
        )

    def _own(self) -> dict[str, object]:
        return {
            "scheduled": self.schedule.name,
            **{f"scheduled.{key}": value for key, value in self.schedule.settings().items()},
        }

    def turns(self) -> set[int]:
        return super().turns() | turns(self.schedule)

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        factor = self.schedule.factor(step)
        rates = {
            key: (value.to(torch.float64) * factor).to(value.dtype) if _is_rate(key) else value
            for key, value in hyper.items()
        }
        return self.optimizer.update(parameters, gradients, state, step, rates)


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == "lr"
