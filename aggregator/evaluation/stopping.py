"""Early stopping: when a task's rounds have brought nothing for long enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Evaluated(NamedTuple):
    """A version's figure, and the round that evaluated it."""

    version: int
    round: int
    value: float


def stalled_since(
    history: Sequence[Evaluated],
    *,
    higher_is_better: bool,
    most_rounds: int,
    least_improvement: float,
) -> Evaluated | None:
    """The last version that improved, where ``most_rounds`` rounds followed it without another.

    ``history`` by rising version. The first one improves, and each that is better than the last
    that did, by at least ``least_improvement``.
    """
    sign = 1.0 if higher_is_better else -1.0
    best: Evaluated | None = None
    for each in history:
        gain = math.inf if best is None else sign * (each.value - best.value)
        if gain > 0 and gain >= least_improvement:
            best = each
    if best is None or history[-1].round - best.round < most_rounds:
        return None
    return best
