"""Virtual devices for scatter aggregation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings

Rows = NDArray[np.int64]


class FixedInteractions:
    """Interactions that never change; see ``LocalPositives`` of the scatter learner."""

    def __init__(self, positives: Sequence[Rows]) -> None:
        self._positives = tuple(positives)

    def positives(self) -> Sequence[Rows]:
        """Per local user the item rows, as given."""
        return self._positives


def mixed_columns(
    devices: int, classes: Sequence[int], rng: np.random.Generator
) -> NDArray[np.int64]:
    """k_i of each device: the classes in equal shares, dealt at random."""
    dealt = np.arange(devices, dtype=np.int64) % len(classes)
    columns: NDArray[np.int64] = np.asarray(classes, dtype=np.int64)[rng.permutation(dealt)]
    return columns


def scatter_fleet(
    positives: Sequence[Sequence[Rows]],
    columns: Sequence[int] | NDArray[np.int64],
    step: FactorStep,
    seeds: np.random.SeedSequence,
    pool: PoolSettings | None = None,
) -> list[ScatterLearner]:
    """One learner a device, each with a generator of its own, all sharing one ``step``.

    Args:
        positives: for each device, for each of its users, the item rows of its interactions.
        columns: k_i of each device.
        step: computes gradients; one session serves the whole process.
        seeds: parent of the devices' seeds.
        pool: the devices' privacy settings.

    Raises ValueError when ``positives`` and ``columns`` differ in length.
    """
    children = seeds.spawn(len(positives))
    return [
        ScatterLearner(
            FixedInteractions(users), step, int(count), np.random.default_rng(child), pool
        )
        for users, count, child in zip(positives, columns, children, strict=True)
    ]
