"""The aggregator's half: the mean of what devices sent is the gradient of FedYogi.

FedYogi: Reddi et al. 2021, Adaptive federated optimization, algorithm 2.
"""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from aggregator.methods import shared_model
from device_sdk.fields import Within
from sparse_yogi.learner import SparseTraining


@dataclass(frozen=True, slots=True)
class SparseYogiSettings(shared_model.SharedModelSettings):
    """``tau`` is the optimizer's degree of adaptivity: larger is closer to plain averaging."""

    learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.02
    beta1: Annotated[float, Within(0, 0.9999)] = 0.9
    beta2: Annotated[float, Within(0, 0.9999)] = 0.99
    tau: Annotated[float, Within(0, 1e3, above=True)] = 1e-3
    training: SparseTraining = field(default_factory=SparseTraining)


class SparseYogiMethod(shared_model.SharedModelMethod):
    """``_first`` and ``_second`` are the optimizer's moments."""

    VECTORS = ("first", "second")

    def reset(self) -> None:
        """The optimizer begins anew."""
        super().reset()
        self._second += self._settings.tau**2

    def step(self) -> dict[str, float]:
        """One step of Yogi along the mean of what devices sent."""
        settings, gradient = self._settings, self.mean
        square = np.square(gradient)
        self._first = settings.beta1 * self._first + (1 - settings.beta1) * gradient
        change = square * np.sign(self._second - square)
        self._second = self._second - (1 - settings.beta2) * change
        step = settings.learning_rate * self._first / (np.sqrt(self._second) + settings.tau)
        self._model = (self._model + step).astype(np.float32)
        return {"gradient_norm": float(np.linalg.norm(gradient))}


class SparseYogiBinding(shared_model.SharedModelBinding):
    """Joins the method to a task file."""

    settings_class = SparseYogiSettings
    method_class = SparseYogiMethod
