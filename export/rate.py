"""A learning rate by trial, where an author leaves it out: the range test on the step itself.

Method: Smith 2017, Cyclical learning rates for training neural networks, section 3.3; here each
rate begins with the model as it is.
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from export.optimizers.combinators import Averaged, Clipped
from export.optimizers.traced import Traced
from export.step import Problem
from export.verify import draw_batch, draw_scalars, initial_state, run_graph

TIMES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The rates that are tried, as multiples of the optimizer's own. Of a batch of one class, say, any
rate looks good, so there is a largest."""
_MARGIN = 10.0
"""So many times the rate has to be stable, too."""
_STEPS = 20
_ROUNDING = 1e-4


def is_open(optimizer: object) -> bool:
    """Whether nobody said the rate: one of ours without ``lr``, by itself, clipped or averaged."""
    while isinstance(optimizer, Averaged | Clipped):
        optimizer = optimizer.optimizer
    return isinstance(optimizer, Traced) and optimizer.leaves_rate_open


def rate_by_trial(problem: Problem, train: ort.InferenceSession) -> float | None:
    """The largest rate of which ten times as much is stable: the loss of the example batch does not
    rise above where it began, in 20 steps from the model as it is.

    None where there is none, and where the loss does not fall at it either.
    """
    rates = [float(f"{times * problem.optimizer.hyper()['lr']:.3g}") for times in TIMES]
    at_rest, _ = _course(problem, train, 0.0)
    limit = at_rest + _ROUNDING * max(1.0, abs(at_rest))
    # rates[low] is stable, rates[high] is not.
    low, high, reached = -1, len(rates), at_rest
    while high - low > 1:
        middle = (low + high) // 2
        worst, last = _course(problem, train, _MARGIN * rates[middle])
        if worst <= limit:
            low, reached = middle, last
        else:
            high = middle
    return rates[low] if low >= 0 and reached < at_rest else None


def _course(problem: Problem, train: ort.InferenceSession, rate: float) -> tuple[float, float]:
    """The largest and the last loss of the steps; infinite where one is not finite."""
    rng, sizes = np.random.default_rng(0), problem.axes.example
    state = initial_state(problem, sizes, rng)
    batch = draw_batch(problem, sizes, rng, in_order=True)
    losses: list[float] = []
    for _ in range(_STEPS + 1):
        scalars = {**draw_scalars(problem, rng), "hyper.lr": np.array(rate, dtype=np.float32)}
        got = run_graph(train, {**state, **batch, **scalars}, quietly=True)
        losses.append(float(got["loss"]))
        if not (np.isfinite(losses[-1]) and np.isfinite(got["guard"])):
            return np.inf, np.inf
        state = {name: got.get(f"new.{name[6:]}", value) for name, value in state.items()}
    return max(losses), losses[-1]
