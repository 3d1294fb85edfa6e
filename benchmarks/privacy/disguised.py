"""Learners that change their update before it is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.privacy.experiment import Run
from device_sdk.methods.learner import Learner, State
from device_sdk.wire.arrays.exchange import Broadcast, Update


class DisguisedLearner(Learner):
    """Passes on what ``learner`` trains, disguised as ``run`` says."""

    def __init__(self, learner: Learner, run: Run, rng: np.random.Generator) -> None:
        self._learner = learner
        self._run = run
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        update = self._learner.train(broadcast)
        values = update.tensors["values"]
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        if self._run.disguise == "equal":
            values = values * (lengths.mean() / np.maximum(lengths, 1e-12))
        elif self._run.disguise == "noise":
            noise = self._rng.standard_normal(values.shape) / np.sqrt(values.shape[1])
            values = values + self._run.noise_multiple * lengths * noise
        return replace(update, tensors={**update.tensors, "values": values.astype(np.float32)})

    def state(self) -> State:
        """The inner learner's."""
        return self._learner.state()

    def restore(self, state: State) -> None:
        """Give the inner learner its state back."""
        self._learner.restore(state)
