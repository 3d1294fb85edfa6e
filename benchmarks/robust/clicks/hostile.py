"""Hostile devices in federated averaging."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.robust.attacks import STRENGTH, Attack, noise_like
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Learner, State
from device_sdk.wire.arrays.exchange import Broadcast, Update


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite of the differences. ``noise`` sends normal noise of ten
    times the norm of each tensor. ``promotion`` sends ten times what it learnt, and ``patient``
    just that: their learner is given samples in which an item is always clicked.

    Args:
        learner: the device's real learner.
        attack: what is done to its updates.
        rng: draws the noise.
    """

    def __init__(self, learner: FedAvgLearner, attack: Attack, rng: np.random.Generator) -> None:
        self._learner = learner
        self._attack = attack
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._learner.train(broadcast)
        if self._attack == "noise":
            sent = {name: noise_like(array, self._rng) for name, array in update.tensors.items()}
        else:
            factors = {"flip": -STRENGTH, "promotion": STRENGTH, "patient": np.float32(1)}
            factor = factors[self._attack]
            sent = {name: array * factor for name, array in update.tensors.items()}
        return replace(update, tensors=sent)

    def state(self) -> State:
        """That of the real learner."""
        return self._learner.state()

    def restore(self, state: State) -> None:
        """See :class:`device_sdk.methods.learner.Learner`."""
        self._learner.restore(state)
