"""Five trained steps of an artifact beside torch, from the same state at each.

The artifact trains on the device runtime. Before each step torch, in float32 and in float64, is
given its parameters and buffers, and the randomness that its graph draws; each keeps an optimizer
of torch's own. What float32 torch is off from float64, or what rounding errors in parameters make
of it where that is more, is the yardstick of the artifact's error, as it is when an export is
verified (:mod:`export.verify`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.export_survey.subject import OPTIMIZERS, Subject
from device_sdk import Trainer
from device_sdk.runtime.step import step_seed
from export.rewrites.patch import seeded
from export.step import Randomness
from export.verify import in_double

try:
    from export.verify import rounded_anew
except ImportError:  # another checkout, older than this: only what goes in is moved there

    def rounded_anew(rng: np.random.Generator) -> AbstractContextManager[object]:
        return nullcontext()


STEPS = 5
LEAST_ALLOWED = 1e-4
"""Relative error: parameters near 1 that move by 1e-3 have four digits of their update left."""
TIMES_TORCH = 10.0
SHAKES = 16
"""At most: where a step jumps (ReLU6 at an edge), few of them meet the jump."""
ROUNDING, GROWTH = 3e-7, 1.2
"""The first one's size, and each one's against the last's: a deep network adds up its errors."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Worst:
    """The tensor that is farthest from torch for what it is allowed: relative errors."""

    tensor: str
    step: int
    error: float
    allowed: float

    @property
    def excess(self) -> float:
        """Above 1 is wrong."""
        return self.error / self.allowed if np.isfinite(self.error) else float("inf")


class _Twin:
    """The same train step in torch."""

    def __init__(self, subject: Subject, double: bool) -> None:
        step = subject.step()
        self._arithmetic = in_double if double else nullcontext
        self._loss = step.loss
        # As exported: what is kept in 16 bits is in 32.
        self.model = step.model.double() if double else step.model.float()
        self._batch = {
            name: t.double() if double and t.is_floating_point() else t
            for name, t in step.batch.items()
        }
        self.optimizer = OPTIMIZERS[step.optimizer].torchs(self.model)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        # A sparse one is a constant of the graph.
        dense = torch.strided
        yield from ((n, b) for n, b in self.model.named_buffers() if b.layout == dense)

    def step(self, state: Arrays, number: int) -> tuple[float, dict[str, np.ndarray]]:
        """The loss, and parameters and buffers after a step from ``state``."""
        for name, tensor in self._tensors():
            if name in state:
                tensor.data.copy_(torch.from_numpy(state[name]))
        self.model.train()
        self.optimizer.zero_grad()
        randomness = Randomness(torch.tensor(step_seed(0, number)), torch.tensor(number))
        with self._arithmetic():
            with seeded(randomness):
                result = self._loss(self.model, self._batch)
                loss = result[0] if isinstance(result, tuple) else result
                loss.backward()
            self.optimizer.step()
        after = {name: tensor.detach().numpy().copy() for name, tensor in self._tensors()}
        return float(loss.detach()), after


def compared(subject: Subject, folder: Path) -> Worst:
    """The worst tensor of :data:`STEPS` steps."""
    batch = {name: tensor.numpy() for name, tensor in subject.step().batch.items()}
    trainer = Trainer(folder, providers="cpu", threads=1, seed=0)
    single, exact = _Twin(subject, double=False), _Twin(subject, double=True)
    rng = np.random.default_rng(0)
    worst = Worst("loss", 0, 0.0, 1.0)
    worth: dict[str, float] = {}
    for number in range(STEPS):
        state = _state(trainer)
        memory = copy.deepcopy(single.optimizer.state_dict())
        loss = trainer.step(batch)
        reference = _moved(state, *exact.step(state, number))
        _raise(worth, _errors(_moved(state, *single.step(state, number)), reference))
        errors = _errors(_moved(state, loss, _state(trainer)), reference)
        found = _worst(errors, worth, number)
        if found.excess > 1:
            after = copy.deepcopy(single.optimizer.state_dict())
            for shake in range(SHAKES):
                size = ROUNDING * GROWTH**shake
                single.optimizer.load_state_dict(copy.deepcopy(memory))
                shaken = {name: _shaken(array, rng, size) for name, array in state.items()}
                with rounded_anew(rng):
                    moved = _moved(shaken, *single.step(shaken, number))
                _raise(worth, _errors(moved, reference))
                found = _worst(errors, worth, number)
                if found.excess <= 1:
                    break
            single.optimizer.load_state_dict(after)
        worst = max(worst, found, key=lambda one: one.excess)
    return worst


def _raise(worth: dict[str, float], errors: Mapping[str, float]) -> None:
    """By tensor, the most that rounding has been worth so far: an optimizer remembers it."""
    for name, error in errors.items():
        worth[name] = max(worth.get(name, 0.0), error)


def _state(trainer: Trainer) -> dict[str, np.ndarray]:
    return {**trainer.parameters, **trainer.buffers}


def _shaken(array: np.ndarray, rng: np.random.Generator, size: float) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    moved = array * (1 + size * rng.standard_normal(array.shape))
    return np.asarray(moved, dtype=np.float32)


def _moved(state: Arrays, loss: float, after: Arrays) -> dict[str, np.ndarray]:
    """The loss, and what a step added to each tensor."""
    moved = {"loss": np.array(loss, dtype=np.float64)}
    for name, before in state.items():
        if name in after:
            # From what is infinite (a mask, a range that nothing was seen of) there is no way.
            start = np.where(np.isfinite(before), before, 0).astype(np.float64)
            end = np.where(after[name] == before, start, after[name])
            moved[name] = end - start
    return moved


def _errors(moved: Arrays, reference: Arrays) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(moved[name] - exact) / max(float(np.linalg.norm(exact)), 1e-30))
        for name, exact in reference.items()
    }


def _worst(errors: Mapping[str, float], torchs: Mapping[str, float], number: int) -> Worst:
    return max(
        (
            Worst(name, number, error, max(LEAST_ALLOWED, TIMES_TORCH * torchs[name]))
            for name, error in errors.items()
        ),
        key=lambda one: one.excess,
    )
