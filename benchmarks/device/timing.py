"""Timing two ways of doing one thing, alternately, so that a noisy machine slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """Seconds a call: medians of each contender, and the number of blocks."""

    medians: tuple[float, ...]
    blocks: int

    def ratio(self, contender: int, against: int) -> float:
        """How many times faster ``contender`` is."""
        return self.medians[against] / self.medians[contender]


def alternately(
    contenders: Sequence[Callable[[], object]],
    *,
    seconds: float,
    block_seconds: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time each contender in short blocks in turn; a block's figure is its mean per call."""
    calls = []
    for contender in contenders:
        contender()
        start = clock()
        contender()
        contender()
        once = max((clock() - start) / 2, 1e-6)
        calls.append(max(1, round(block_seconds / once)))
    figures: list[list[float]] = [[] for _ in contenders]
    end = clock() + seconds
    while clock() < end or len(figures[0]) < 7:
        for index, contender in enumerate(contenders):
            start = clock()
            for _ in range(calls[index]):
                contender()
            figures[index].append((clock() - start) / calls[index])
    return Timed(tuple(statistics.median(found) for found in figures), len(figures[0]))
