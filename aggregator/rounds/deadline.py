"""How long the next round collects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.task.round_settings import RoundSettings

__all__ = ["LAST_ROUNDS", "LateArrivals", "deadline_seconds"]

LAST_ROUNDS = 5
_QUANTILE = 0.9
_MOST_LATE_IN_A_ROUND = 20_000


def deadline_seconds(settings: RoundSettings, arrivals: Sequence[NDArray[np.float32]]) -> float:
    """Seconds until the deadline of a round that opens now.

    ``arrivals``: seconds after the opening at which the updates of the last rounds arrived, late
    ones included (without them a deadline that cut off the slow would go on shrinking). With
    ``adaptive_deadline`` it is their 90th percentile, over all of these rounds together, times the
    margin, within the configured bounds.

    An arrival counts for no more than ``settings.deadline_seconds``. Each device has one a round,
    so a part of the fleet moves the result by its share: while fewer than a tenth of the arrivals
    are of devices that lie, it is no longer than the slowest honest one's, times the margin.
    """
    if not settings.adaptive_deadline:
        return settings.deadline_seconds
    known = [times for times in arrivals[:LAST_ROUNDS] if len(times)]
    if not known:
        return settings.deadline_seconds
    capped = np.minimum(np.concatenate(known), settings.deadline_seconds)
    wanted = float(np.quantile(capped, _QUANTILE)) * settings.deadline_margin
    return float(np.clip(wanted, settings.least_deadline_seconds, settings.deadline_seconds))


class LateArrivals:
    """When devices came that missed the last rounds' ends: the first time of each device a round.

    In memory: after a restart, deadlines know of no late device until one is late again.
    """

    def __init__(self) -> None:
        self._since_round = 0
        self._seconds: dict[int, dict[bytes, float]] = {}

    def round_opens(self, number: int) -> None:
        """Forget all but the last rounds before this one."""
        self._since_round = number - LAST_ROUNDS
        for old in [each for each in self._seconds if each < self._since_round]:
            del self._seconds[old]

    def note(self, number: int, device_id: bytes, seconds: float) -> None:
        """A device's update for round ``number`` came ``seconds`` after the round's opening."""
        if number < self._since_round:
            return
        first = self._seconds.setdefault(number, {})
        # Beyond the bound the slow are many enough to decide the deadline.
        if len(first) < _MOST_LATE_IN_A_ROUND:
            first.setdefault(device_id, seconds)

    def seconds(self) -> NDArray[np.float32]:
        """All of them, of all these rounds."""
        return np.array(
            [each for first in self._seconds.values() for each in first.values()], np.float32
        )
