"""Known updates of unequal devices, which train parts of one model: FedAvg over a ladder.

Its versions are means, which tell no device apart; so a run's state is held against that of a
method that absorbs the commits in their order and never crashed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.fedavg import FedAvgBinding, FedAvgMethod, FedAvgSettings
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.exchange import Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from tests.fakes.ladders import ladder_method

SHAPE, RANKS = (24, 40), (2, 5, 11)


class LadderBinding(FedAvgBinding):
    """FedAvg's messages, and a ladder that no artifact lies behind."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("fedavg", FedAvgSettings())

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        """See :class:`~aggregator.methods.method.Binding`."""
        return ladder_method(SHAPE, RANKS, settings=self.settings)


def ladder_body(place: int, generation: int, round_number: int) -> bytes:
    """The update of device ``place``, which trains one rung in all rounds, in float32."""
    rng = np.random.default_rng([place, generation, round_number])
    rung = 1 + place % (len(RANKS) + 1)
    shapes: dict[str, tuple[int, ...]] = {"w.net.w": SHAPE, "w.net.b": (6,)}
    if rung <= len(RANKS):
        rank = RANKS[rung - 1]
        del shapes["w.net.w"]
        shapes |= {"w.net.w.left": (SHAPE[0], rank), "w.net.w.right": (rank, SHAPE[1])}
    moved = {
        name: (0.01 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    metadata = {"samples": 1 + place % 7, "loss": 0.5, "rung": rung}
    return encode_update(Update(round_number, moved, metadata), Codec.FLOAT32)
