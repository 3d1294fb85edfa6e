"""The fixed set of unseen items that a device shows beside the ones its users touched.

The rows of an update tell which items took part in training. A set of extra items that changed
every round could be intersected away, so each device draws its set once and only ever adds to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PoolSettings", "grow_pool"]

_MOST_TELLING_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many unseen items a device mixes in. A device's own choice, never the aggregator's.

    They do not hide what is true from an aggregator that looks at the values of updates: what they
    are measured to hide, and at which price, is in ``docs/methods/scatter.md``.

    Attributes:
        pseudo_per_positive: pseudo-items per true interaction. They take part in every epoch as
            weak positives, and their rows are uploaded as often as those of true positives.
        pseudo_weight: weight of a pseudo-item's triple against 1 for a true one. With less than 1,
            one update shows by its sizes which items are true.
        negatives_per_positive: size of the pool that negatives come from, per true interaction,
            or 0 for every unseen item (more accurate; each single row is then seen more rarely).
        smallest_pool: lower bound of that pool's size when ``negatives_per_positive`` is not 0.

    Raises ValueError for a negative or non-finite number.
    """

    pseudo_per_positive: float = 0.5
    pseudo_weight: float = 0.1
    negatives_per_positive: float = 0.0
    smallest_pool: int = 0

    def __post_init__(self) -> None:
        for name in (
            "pseudo_per_positive",
            "pseudo_weight",
            "negatives_per_positive",
            "smallest_pool",
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}; expected a finite number of at least 0")

    @property
    def hides_sizes(self) -> bool:
        """Whether weights are near enough to leave anything to hide.

        If so, pseudo-items are treated like true ones in all else too, at the cost of more rows.
        """
        return self.pseudo_weight > _MOST_TELLING_WEIGHT

    def pseudo_items(self, positives: int) -> int:
        """Number of pseudo-items of a device with that many interactions."""
        return math.ceil(self.pseudo_per_positive * positives)

    def pool_size(self, positives: int) -> int:
        """Number of items that must be in the pool of a device with that many interactions."""
        negatives = math.ceil(self.negatives_per_positive * positives)
        if self.negatives_per_positive > 0:
            negatives = max(negatives, self.smallest_pool)
        pseudo = self.pseudo_items(positives)
        # Pseudo-items that are no negatives leave the pool's other part for those.
        return negatives + pseudo if self.hides_sizes else max(negatives, pseudo)


def grow_pool(
    pool: NDArray[np.int64],
    seen: NDArray[np.bool_],
    size: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Append random unseen items until ``pool`` holds ``size`` of them, or all there are.

    What is in the pool stays, in its place, also when a user has come to like it since: any prefix
    is as fixed as the whole.

    Args:
        pool: item rows drawn so far, distinct.
        seen: bool [items], true where any local user has interacted with the item.
        size: wanted length.
        rng: source of the draw.
    """
    if len(pool) >= size:
        return pool
    free = ~seen
    free[pool] = False
    unseen = np.flatnonzero(free)
    drawn = rng.choice(unseen, size=min(size - len(pool), len(unseen)), replace=False)
    return np.concatenate([pool, drawn.astype(np.int64)])
