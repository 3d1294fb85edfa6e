"""An aggregator that keeps to the protocol and looks at what comes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter.method import ScatterMethod, ScatterSettings
from benchmarks.privacy.sighting import Sighting, sight
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.wire.arrays.exchange import Update


class CuriousMethod(ScatterMethod):
    """Scatter aggregation as it is, which takes down what it sees of some devices.

    Args:
        items: the first matrix, float32 [items, K].
        settings: of the task.
        watched: names of the devices to look at.
        popularity: float64 [items]; see ``sight``.
        users: how many share a device.
        rng: rounds what is looked at to int8, as it travels unless the task says otherwise.
    """

    def __init__(
        self,
        items: NDArray[np.float32],
        settings: ScatterSettings,
        watched: Collection[str],
        popularity: NDArray[np.float64],
        users: int,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(items, settings)
        self._popularity = popularity
        self._users = users
        self._rng = rng
        self.seen: dict[str, list[Sighting]] = {name: [] for name in watched}
        """What was seen of each watched device, oldest first."""

    def absorb(self, update: Update) -> None:
        """Take the update in, and a look at it."""
        super().absorb(update)
        seen = self.seen.get(update.sender)
        if seen is not None and len(update.tensors["rows"]):
            seen.append(self.look(update))

    def look(self, update: Update) -> Sighting:
        """What an update shows that is not taken in."""
        items, width = self.items.shape
        body = encode_scatter_update(update, width, "int8", self._rng)
        arrived = decode_scatter_update(body, update.round_id, items, width)
        return sight(arrived, self.items, self._popularity, self._users)
