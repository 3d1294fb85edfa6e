"""Optimizers on the averaged update, with state that can be saved bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.methods.state import COUNT, Entry, Schema, Stateful

Floats = NDArray[np.float32]
_MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Declared):
    """Settings of the server's optimizer.

    Attributes:
        name: ``plain`` moves the parameters by ``learning_rate`` times the averaged gradient;
            ``adam`` is Adam (Kingma and Ba 2015, algorithm 1) on that gradient.
        learning_rate: of the first step.
        beta1: adam's, of the first moment. 0 makes it RMSProp with bias correction.
        beta2: adam's, of the second moment.
        epsilon: adam's, beside the second moment's root.
        decay: after t steps the rate is ``learning_rate * decay**t``.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    name: Literal["plain", "adam"] = "adam"
    learning_rate: Annotated[float, Within(0, above=True)] = 0.02
    beta1: Annotated[float, Within(0, 1, below=True)] = 0.0
    beta2: Annotated[float, Within(0, 1, below=True)] = 0.99
    epsilon: Annotated[float, Within(0, above=True)] = 1e-3
    decay: Annotated[float, Within(0, 1, above=True)] = 1.0


class ServerOptimizer(Stateful):
    """Applies averaged gradients to one parameter matrix of a given shape."""

    def __init__(self, settings: OptimizerSettings, shape: tuple[int, int]) -> None:
        self._settings = settings
        self._shape = shape
        self._steps = 0
        if settings.name == "adam":
            self._first_moment = np.zeros(shape, dtype=np.float32)
            self._second_moment = np.zeros(shape, dtype=np.float32)

    @property
    def factor(self) -> float:
        """What the rates have decayed to after the steps so far: ``decay ** steps``."""
        return float(self._settings.decay**self._steps)

    def step(self, parameters: Floats, gradient: Floats) -> Floats:
        """New parameters, float32 of the optimizer's shape; the given ones stay as they are."""
        settings = self._settings
        rate: float = settings.learning_rate * self.factor
        self._steps += 1
        if settings.name == "plain":
            return parameters - np.float32(rate) * gradient
        first, second = self._first_moment, self._second_moment
        first *= np.float32(settings.beta1)
        first += np.float32(1 - settings.beta1) * gradient
        second *= np.float32(settings.beta2)
        second += np.float32(1 - settings.beta2) * np.square(gradient)
        first_correction: float = 1 - settings.beta1**self._steps
        second_correction: float = 1 - settings.beta2**self._steps
        root = np.sqrt(second / np.float32(second_correction)) + np.float32(settings.epsilon)
        moved: Floats = parameters - np.float32(rate / first_correction) * first / root
        return moved

    def grow(self, rows: int) -> None:
        """Append ``rows`` rows without history, for items that are new to the catalogue."""
        width = self._shape[1]
        self._shape = (self._shape[0] + rows, width)
        fresh = np.zeros((rows, width), dtype=np.float32)
        if self._settings.name == "adam":
            self._first_moment = np.concatenate([self._first_moment, fresh])
            self._second_moment = np.concatenate([self._second_moment, fresh])

    def _schema(self) -> Schema:
        moments = _MOMENTS if self._settings.name == "adam" else ()
        return {"steps": COUNT, **{name: Entry(np.float32, self._shape) for name in moments}}
