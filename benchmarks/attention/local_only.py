"""Devices that learn alone, on the same footing as the others: the baseline."""

from __future__ import annotations

import numpy as np

from aggregator.methods.method import Method, RoundSummary
from benchmarks.attention.experiment import Local
from device_sdk.local_data import LocalData
from device_sdk.methods import learner
from device_sdk.methods.local_steps import SampleStream
from device_sdk.methods.state import State
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update


class LocalLearner(learner.Learner):
    """Takes a round's steps on its own samples and sends nothing."""

    def __init__(
        self, data: LocalData, trainer: Trainer, settings: Local, rng: np.random.Generator
    ) -> None:
        self.trainer = trainer
        self._settings = settings
        self._stream = SampleStream(data.train, settings.batch_size, rng)

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        rate = float(broadcast.settings["learning_rate"])
        for _ in range(self._settings.steps):
            self.trainer.step(self._stream.draw(), hyper={"lr": rate})
        return Update(broadcast.round_id, {})

    def state(self) -> learner.State:
        """The trainer's."""
        return self.trainer.state

    def restore(self, state: learner.State) -> None:
        """Take ``state()`` back."""
        self.trainer.set_state(state)


class LocalMethod(Method):
    """Counts the devices, and shares nothing."""

    def __init__(self, settings: Local) -> None:
        self._settings = settings
        self._round_id = 0
        self._participants = 0

    def open_round(self, round_id: int) -> Broadcast:
        """A broadcast that holds the learning rate alone."""
        self._round_id, self._participants = round_id, 0
        return Broadcast(round_id, 0, {}, {"learning_rate": self._settings.learning_rate})

    def check(self, update: Update) -> None:
        """Takes everything: there is nothing in it."""

    def absorb(self, update: Update) -> None:
        """Counts the device."""
        self._participants += 1

    def close_round(self) -> RoundSummary:
        """See :class:`~aggregator.methods.method.Method`."""
        return RoundSummary(self._round_id, 0, self._participants)

    def state(self) -> State:
        """The round."""
        return {"round": np.asarray(self._round_id, dtype=np.int64)}

    def restore(self, state: State) -> None:
        """Take ``state()`` back."""
        self._round_id = int(state["round"])
