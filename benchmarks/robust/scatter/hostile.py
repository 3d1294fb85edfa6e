"""Devices that mean harm: real learners whose updates are replaced before they are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.robust.attacks import STRENGTH, Attack, noise_like
from device_sdk.methods.learner import Learner, State
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update

_ADMIRED = 10


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite. ``noise`` sends normal noise of ten times the norm, in
    the same rows. ``promotion`` sends the honest update, but for one row: ``item`` is pushed
    towards the mean of the ten items that the device's own user likes best, ten times as hard as
    the update's largest row. ``patient`` pushes as hard as that row and no harder, so that nothing
    about the update's sizes is unusual.

    Args:
        honest: the device's real learner, of one user.
        attack: what is done to its updates.
        item: row to promote.
        rng: draws the noise.
    """

    def __init__(
        self, honest: ScatterLearner, attack: Attack, item: int, rng: np.random.Generator
    ) -> None:
        self._honest = honest
        self._attack = attack
        self._item = item
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if not len(update.tensors["rows"]):
            return update
        if self._attack == "flip":
            tensors = {**update.tensors, "values": update.tensors["values"] * -STRENGTH}
        elif self._attack == "noise":
            tensors = {**update.tensors, "values": noise_like(update.tensors["values"], self._rng)}
        else:
            strength = np.float32(1.0) if self._attack == "patient" else STRENGTH
            tensors = self._promoting(update.tensors, broadcast.tensors["items"], strength)
        return replace(update, tensors=tensors)

    def state(self) -> State:
        """That of the honest learner."""
        return self._honest.state()

    def restore(self, state: State) -> None:
        """See :class:`device_sdk.methods.learner.Learner`."""
        self._honest.restore(state)

    def _promoting(
        self, tensors: State, items: NDArray[Any], strength: np.float32
    ) -> dict[str, NDArray[Any]]:
        rows, columns, values = tensors["rows"], tensors["columns"], tensors["values"]
        known = items.astype(np.float32)
        best = np.argsort(known @ self._honest.users[0])[-_ADMIRED:]
        towards = known[best].mean(axis=0)[columns]
        size = strength * np.linalg.norm(values, axis=1).max()
        # The server descends: a negative gradient moves the row towards the goal.
        push = -size * towards / max(float(np.linalg.norm(towards)), 1e-12)
        place = int(np.searchsorted(rows, self._item))
        if place == len(rows) or rows[place] != self._item:
            rows = np.insert(rows, place, self._item)
            values = np.insert(values, place, 0, axis=0)
        values = values.copy()
        values[place] = push
        return {"rows": rows, "columns": columns, "values": values.astype(np.float32)}
