"""What was tried to bring an unequal fleet nearer to one in which all train the full model, and is
no part of the product: soft labels for smaller rungs, and rates of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import Method
from benchmarks.simulation import device_name
from benchmarks.submodels.tasks import SOFT, Samples, rows_of
from device_sdk import LocalData, Trainer
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.local_steps import predict_all


class Slowed(Trainer):
    """A rung whose steps are at ``share`` of the round's rate."""

    def __init__(self, folder: Path, share: float) -> None:
        super().__init__(folder, providers="cpu")
        self._share = share

    def step(
        self, batch: Mapping[str, NDArray[Any]], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """See :class:`Trainer`."""
        rate = {**self.hyper, **(hyper or {})}["lr"]
        return super().step(batch, hyper={**(hyper or {}), "lr": self._share * rate})


class Teacher:
    """The full model as a round begins, with all of which it is asked (Hinton et al. 2015,
    Distilling the knowledge in a neural network, section 2). An upper bound: a device that trains a
    smaller rung neither fetches the full model nor affords its logits.

    method: whose model it is.
    folder: of the full model's artifact.
    temperature: of its soft labels.
    """

    def __init__(self, method: Method, folder: Path, temperature: float) -> None:
        self._method, self._temperature = method, temperature
        trainer = Trainer(folder, providers="cpu")
        rng = np.random.default_rng(0)
        self._learner = FedAvgLearner(lambda: LocalData({}), trainer, device_name(0), rng)
        self._version = -1

    def teaches(self, samples: Samples) -> Samples:
        """The samples with their soft labels."""
        if self._method.version != self._version:
            self._learner.adopt(self._method.tell())
            self._version = self._method.version
        logits = predict_all(self._learner.trainer, {"x": samples["x"]}, "logits")
        shifted = np.exp((logits - logits.max(1, keepdims=True)) / self._temperature)
        return {**samples, SOFT: shifted / shifted.sum(1, keepdims=True)}


def untaught(samples: Samples) -> Samples:
    """The samples with soft labels that no loss heeds."""
    return {**samples, SOFT: np.zeros((rows_of(samples), 10), np.float32)}
