"""A device's pool and triples, prepared once for as long as its data stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.pool import PoolSettings, grow_pool
from device_sdk.methods.scatter.triples import TripleSource, seen_by_anyone

__all__ = ["LocalTriples"]

Rows = NDArray[np.int64]


class LocalTriples:
    """Makes a :class:`TripleSource` anew only where interactions, catalogue or pool have changed.

    Args:
        settings: the device's own choice of what to mix in.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._items: Rows = np.empty(0, dtype=np.int64)
        self._lengths: list[int] = []
        self._catalogue = -1
        self._pool: Rows = np.empty(0, dtype=np.int64)
        self._source: TripleSource | None = None

    def of(
        self, positives: Sequence[Rows], catalogue: int, pool: Rows, rng: np.random.Generator
    ) -> tuple[Rows, TripleSource]:
        """The pool, longer than ``pool`` where it must grow, and the source that goes with it.

        Args:
            positives: per local user the distinct item rows of its interactions.
            catalogue: number of items.
            pool: the device's fixed pool so far.
            rng: draws what the pool lacks.

        Raises LearnerError when an interaction's item is outside the catalogue.
        """
        lengths = [len(rows) for rows in positives]
        # Contents are compared, at a few microseconds: arrays may be the same and yet changed.
        items = np.concatenate([np.empty(0, dtype=np.int64), *positives])
        if (
            self._source is not None
            and catalogue == self._catalogue
            and lengths == self._lengths
            and np.array_equal(items, self._items)
            and np.array_equal(pool, self._pool)
        ):
            return self._pool, self._source
        _require_in_catalogue(items, catalogue)
        seen = seen_by_anyone(positives, catalogue)
        grown = grow_pool(pool, seen, self._settings.pool_size(len(items)), rng)
        source = TripleSource(positives, grown, seen, self._settings)
        self._items, self._lengths, self._catalogue = items, lengths, catalogue
        self._pool, self._source = grown, source
        return grown, source


def _require_in_catalogue(items: Rows, catalogue: int) -> None:
    if len(items) and (items.min() < 0 or items.max() >= catalogue):
        raise LearnerError(
            f"the local data names item row {int(items.max())}, but the broadcast has "
            f"{catalogue} items; the catalogue on the device is not the broadcast's"
        )
