"""How long the next round collects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.round_settings import RoundSettings

__all__ = ["LAST_ROUNDS", "deadline_seconds"]

LAST_ROUNDS = 5
_QUANTILE = 0.9


def deadline_seconds(settings: RoundSettings, arrivals: Sequence[NDArray[np.float32]]) -> float:
    """Seconds until the deadline of a round that opens now.

    ``arrivals``: seconds after the opening at which the updates of the last rounds arrived, late
    ones included (without them a deadline that cut off the slow would go on shrinking). With
    ``adaptive_deadline`` it is their 90th percentile, over all of these rounds together, times the
    margin, within the configured bounds.
    """
    if not settings.adaptive_deadline:
        return settings.deadline_seconds
    known = [times for times in arrivals[:LAST_ROUNDS] if len(times)]
    if not known:
        return settings.deadline_seconds
    wanted = float(np.quantile(np.concatenate(known), _QUANTILE)) * settings.deadline_margin
    return float(np.clip(wanted, settings.least_deadline_seconds, settings.deadline_seconds))
