"""How long one round's training takes on this machine, by k, before anything is throttled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, initial_items
from device_sdk.methods.scatter.factor_step import NumpyStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.system.clock import Clock, slowed

Rows = NDArray[np.int64]
# Runs in a row of one k, as devices time them: the caches then hold what that k needs.
_BLOCK = 8
LIKE_SLOWDOWN = 2.0
"""About what the demo's devices emulate."""


@dataclass(frozen=True, slots=True)
class _Positives:
    rows: Sequence[Rows]

    def positives(self) -> Sequence[Rows]:
        return self.rows


def round_seconds(
    positives: Sequence[Rows],
    items: int,
    width: int,
    clock: Clock,
    rng: np.random.Generator,
    *,
    ks: Sequence[int] = (1, 16, 32, 48, 64, 96, 128),
    blocks: int = 8,
    slowdown: float = 1.0,
) -> dict[int, float]:
    """By k the p90 of ``blocks`` times 8 rounds' seconds, of a device that holds ``positives``.

    With a ``slowdown`` there are pauses between the runs, as on a device that emulates it. They are
    not in the result, but what they do to caches and clock rate is.

    The different k take turns, so that a machine that gets slower in the meantime slows all of
    them.
    """
    broadcast = ScatterMethod(initial_items(items, width, 0.01, rng)).open_round(1)
    learners = {
        k: ScatterLearner(_Positives(positives), NumpyStep(), k, rng) for k in ks if 1 <= k <= width
    }
    times: dict[int, list[float]] = {k: [] for k in learners}
    for _ in range(blocks):
        for k, learner in learners.items():
            learner.train(broadcast)
            for _ in range(_BLOCK):
                start = clock.now()
                learner.train(broadcast)
                times[k].append(slowed(clock, start, slowdown) / slowdown)
    return {k: float(np.quantile(taken, 0.9)) for k, taken in times.items()}
