"""Which updates are out of line with the fleet's: far too large, or far too lopsided.

A limit bounds what a hostile device adds; an update that no honest device would send need not be
bounded, it can be left out. The measures are an update's own, so that updates are judged one by
one, as they come, and the scale is the running median, which a minority does not choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.clipping import row_sizes
from aggregator.methods.method import StateError
from aggregator.methods.saved_state import require_count

__all__ = ["Outliers"]

_WINDOW = 256
"""Updates that the running medians are taken over."""
_LEAST_ALIKE = 32
"""Updates of a class within the window that make it a class of its own. Whoever wants to be the
majority of such a class needs a sixteenth of all updates."""
_MOST_APART = 16.0
"""How much larger than the fleet's a class's median may be taken to be. While a model takes off,
devices of all columns are ahead of the others by a factor of ten."""

Floats = NDArray[np.float64]


class Outliers:
    """Tells updates apart by their size and their peak, each against its running median.

    The *size* of an update [rows, columns] is the root mean square of its values. Devices that
    train more columns run ahead while a model takes off, so it is compared with the updates of as
    many columns, to a power of two, where the last 256 updates hold at least 32 of them. The *peak*
    is the size of the largest row over the mean size of the rows: from 1 to the number of rows,
    whatever the update is multiplied by.

    Args:
        multiple: an update is an outlier with a size or a peak of more than so many medians.

    Both are noted for every update, outliers too, in the order of the commits. A round that is
    given up leaves no trace, as with :class:`~aggregator.methods.clipping.AdaptiveLimit`.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._settled: Floats = np.empty((0, 3), dtype=np.float64)
        self._recent: Floats = self._settled
        self.count = 0
        """Outliers of this round."""

    def holds(self, values: NDArray[np.float32]) -> bool:
        """Take note of an accepted update, [rows, columns]; whether it is an outlier.

        An update without rows, or of zeros, is none and is not noted.
        """
        if not values.size:
            return False
        sizes = row_sizes(values)
        mean = float(sizes.mean())
        if mean == 0:
            return False
        size, peak = float(np.sqrt(np.square(sizes).mean())), float(sizes.max()) / mean
        width = values.shape[1].bit_length()
        self._recent = np.vstack([self._recent[-(_WINDOW - 1) :], (size, peak, width)])
        usual = np.median(self._recent[:, :2], axis=0)
        alike = self._recent[self._recent[:, 2] == width, 0]
        if len(alike) >= _LEAST_ALIKE:
            usual[0] = min(float(np.median(alike)), _MOST_APART * usual[0])
        found = bool(size > self._multiple * usual[0] or peak > self._multiple * usual[1])
        self.count += found
        return found

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._recent = self._settled
        self.count = 0

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled = self._recent

    def state(self) -> dict[str, NDArray[Any]]:
        """``settled`` and ``recent``, float64 [at most 256, 3] of size, peak and class, and
        ``count`` int64 scalar; copies."""
        return {
            "settled": self._settled.copy(),
            "recent": self._recent.copy(),
            "count": np.asarray(self.count, dtype=np.int64),
        }

    @classmethod
    def from_state(cls, multiple: float, state: Mapping[str, NDArray[Any]]) -> Outliers:
        """One that continues from ``state()``; an empty state is a fresh start, as where the option
        was just turned on. Raises StateError for anything else."""
        found = cls(multiple)
        if not state:
            return found
        if set(state) != {"settled", "recent", "count"}:
            raise StateError(f"the outliers' state holds {sorted(state)}")
        for name in ("settled", "recent"):
            noted = state[name]
            fits = noted.dtype == np.float64 and noted.ndim == 2 and noted.shape[1] == 3
            fits = fits and len(noted) <= _WINDOW
            if not fits or not np.isfinite(noted).all() or (noted < 0).any():
                raise StateError(
                    f"the outliers' {name!r} is {noted.dtype} {noted.shape}; expected at most "
                    f"{_WINDOW} rows of three finite float64, none below 0"
                )
        found._settled, found._recent = state["settled"].copy(), state["recent"].copy()
        found.count = require_count(state["count"], "outliers' count")
        return found
