"""From noisy runs at some ks to the largest k whose p90 keeps a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Runs = Mapping[int, Sequence[Sequence[float]]]
"""Per k, blocks of steady runs in seconds."""

# Standard errors by which a cost must be away from the limit to count as clear of it.
_CLEAR = 3.0
# Relative distance from the limit that is asked in addition of a k measured only once.
_ONE_BLOCK = 0.5
# A median's standard error in those of a mean, for normal noise.
_MEDIAN_ERROR = 1.2533


def p90_estimates(runs: Runs) -> dict[int, float]:
    """The p90 per k in seconds: its own median times a tail ratio shared by all ks.

    A p90 of a few runs is a lottery, a median is not. What makes the tail (the scheduler, other
    programs) is the machine's, not k's, so p90 / median is pooled over every run there is.
    """
    medians = {k: _median(blocks) for k, blocks in runs.items()}
    relative = [
        np.concatenate([np.asarray(block) for block in blocks]) / medians[k]
        for k, blocks in runs.items()
    ]
    tail = float(np.quantile(np.concatenate(relative), 0.9)) if relative else 1.0
    return {k: median * max(tail, 1.0) for k, median in medians.items()}


def relative_errors(runs: Runs) -> dict[int, float]:
    """The relative standard error of each k's median, from the spread in and between blocks."""
    within = _pooled([block for blocks in runs.values() for block in blocks])
    between = _pooled([[_middle(block) for block in blocks] for blocks in runs.values()])
    return {
        k: max(
            _MEDIAN_ERROR * within / math.sqrt(sum(len(block) for block in blocks)),
            between / math.sqrt(len(blocks)),
        )
        for k, blocks in runs.items()
    }


def bounds(runs: Runs, limit_seconds: float, max_k: int) -> tuple[int, int]:
    """The largest k that clearly fits (0: none), and the largest that is not clearly beaten."""
    limit_seconds *= 1.0 + 1e-9  # a tie is a fit, whatever the clock's rounding
    cost = p90_estimates(runs)
    error = {k: _doubt(relative, len(runs[k])) for k, relative in relative_errors(runs).items()}
    low = max((k for k in cost if cost[k] * (1.0 + error[k]) <= limit_seconds), default=0)
    beaten = [k for k in cost if k > low and cost[k] * (1.0 - error[k]) > limit_seconds]
    return low, min(beaten, default=max_k + 1) - 1


def _doubt(relative_error: float, blocks: int) -> float:
    """How far from the limit a cost has to be. One block may have met an unusual moment."""
    lucky = _ONE_BLOCK if blocks == 1 and relative_error > 0.0 else 0.0
    return _CLEAR * relative_error + lucky


def largest_fitting(runs: Runs, limit_seconds: float, max_k: int) -> int:
    """The largest k in 0 to `max_k` whose p90 is estimated to be at most the limit.

    Where measurements are clear of the limit they decide alone. Between the largest k that clearly
    fits and the next one that clearly does not, a straight line through the neighbourhood decides:
    it averages the noise of all ks around the crossing, so that two measurements agree.
    """
    low, high = bounds(runs, limit_seconds, max_k)
    if low >= high or not runs:
        return low
    cost = p90_estimates(runs)
    passing = max((k for k in cost if cost[k] <= limit_seconds), default=0)
    near = sorted(k for k in cost if max(1, passing) / 2 <= k <= 4 * max(1, passing))
    if len(near) < 2:
        return min(max(passing, low), high)
    weights = np.sqrt([float(sum(len(block) for block in runs[k])) for k in near])
    seconds = np.array([cost[k] for k in near])
    crossing = _crossing(np.array(near, np.float64), seconds, weights, limit_seconds)
    return min(max(crossing, low), high)


def _crossing(
    ks: NDArray[np.float64],
    seconds: NDArray[np.float64],
    weights: NDArray[np.float64],
    limit_seconds: float,
) -> int:
    """Where the line of least squares reaches the limit, rounded down; a level line never does."""
    # Relative residuals: noise grows with the time it disturbs.
    slope, offset = (float(value) for value in np.polyfit(ks, seconds, 1, w=weights / seconds))
    if slope * float(np.ptp(ks)) <= 1e-9 * abs(float(seconds.mean())):
        fits = float(np.average(seconds, weights=weights)) <= limit_seconds
        return np.iinfo(np.int32).max if fits else 0
    return math.floor(min((limit_seconds - offset) / slope, 1e9) + 1e-9)


def _median(blocks: Sequence[Sequence[float]]) -> float:
    return float(np.median([seconds for block in blocks for seconds in block]))


def _middle(block: Sequence[float]) -> float:
    return float(np.median(block))


def _pooled(groups: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation within groups, robust against outliers."""
    deviations = [
        np.abs(np.asarray(group) / np.median(group) - 1.0)
        * math.sqrt(len(group) / (len(group) - 1))
        for group in groups
        if len(group) > 1
    ]
    return 1.4826 * float(np.median(np.concatenate(deviations))) if deviations else 0.0
