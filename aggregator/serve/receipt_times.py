"""How long devices' updates wait here for their receipts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class ReceiptTimes:
    """Updates by how long they waited, since the start of the process: from when their group was
    taken in until their receipts were on their way, the commit between.

    Attributes:
        counts: at most so long as each of ``BOUNDS_SECONDS``, and longer than the one before it;
            the last one: longer than all.
        seconds: of all of them together.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_SECONDS) + 1)
    seconds: float = 0.0

    def with_group(self, updates: int, seconds: float) -> ReceiptTimes:
        """And so many that waited for as long as this."""
        place = bisect_left(BOUNDS_SECONDS, seconds)
        counts = (*self.counts[:place], self.counts[place] + updates, *self.counts[place + 1 :])
        return ReceiptTimes(counts, self.seconds + updates * seconds)

    def within(self, share: float) -> float | None:
        """The least of ``BOUNDS_SECONDS`` within which that share of them had theirs; None: it
        takes longer, or there were none."""
        sums = [*accumulate(self.counts)]
        enough = zip(BOUNDS_SECONDS, sums, strict=False)
        return next((bound for bound, had in enough if had and had >= share * sums[-1]), None)
