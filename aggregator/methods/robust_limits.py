"""What is done to every update before it counts: rows and norms are held within limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.clipping import (
    AdaptiveLimit,
    bounded_rows,
    clip_factor,
    euclidean_norm,
    row_sizes,
)
from aggregator.methods.method import StateError

__all__ = ["UpdateLimits"]

Floats = NDArray[np.float32]


class UpdateLimits:
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

    Args:
        clip_norm: the largest Euclidean norm; 0 for no limit.
        clip_multiple: likewise, as a multiple of the running median of updates' norms.
        row_multiple: the largest size of a row, as a multiple of the running median of updates'
            median rows; for updates of two dimensions. Sizes are root mean squares, so a device
            that trains few columns is measured as one that trains many.

    Memory is that of a few hundred numbers.
    """

    def __init__(
        self, clip_norm: float, clip_multiple: float = 0.0, row_multiple: float = 0.0
    ) -> None:
        self._clip_norm = clip_norm
        self._norms = AdaptiveLimit(clip_multiple) if clip_multiple else None
        self._rows = AdaptiveLimit(row_multiple) if row_multiple else None
        self._multiples = {"norms": clip_multiple, "rows": row_multiple}
        self.bounded_rows = 0
        """Rows of this round that were scaled down."""

    def apply(self, values: Floats) -> tuple[Floats, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm. For an accepted update, once, in commit order."""
        limit = self._clip_norm
        if values.size and self._rows is not None:
            sizes = row_sizes(values)
            of_row = self._rows.of(float(np.median(sizes)))
            values, count = bounded_rows(values, sizes, of_row)
            self.bounded_rows += count
        if values.size and self._norms is not None:
            of_norm = self._norms.of(euclidean_norm(values))
            limit = min(limit, of_norm) if limit else of_norm
        return values, clip_factor(values, limit)

    def begin(self) -> None:
        """A round begins; what was noted in one that made no version is forgotten."""
        self.bounded_rows = 0
        for limit in self._adaptive().values():
            limit.begin()

    def settle(self) -> None:
        """The round made a version."""
        for limit in self._adaptive().values():
            limit.settle()

    def state(self) -> dict[str, NDArray[Any]]:
        """``norms.*`` and ``rows.*`` of the limits in use, and ``bounded`` int64 scalar with the
        latter."""
        found = {
            f"{name}.{part}": array
            for name, limit in self._adaptive().items()
            for part, array in limit.state().items()
        }
        if self._rows is not None:
            found["bounded"] = np.asarray(self.bounded_rows, dtype=np.int64)
        return found

    def continued(self, state: Mapping[str, NDArray[Any]]) -> UpdateLimits:
        """Limits with these settings that continue from ``state()``; this object is unchanged.

        A limit that the state does not know starts afresh, and what is no longer in use is dropped:
        the options may change between rounds. Raises StateError for arrays that do not fit.
        """
        found = UpdateLimits(self._clip_norm, self._multiples["norms"], self._multiples["rows"])
        limits = {
            name: AdaptiveLimit.from_state(
                self._multiples[name],
                {n.removeprefix(f"{name}."): a for n, a in state.items() if n.startswith(name)},
            )
            for name in found._adaptive()
        }
        found._norms, found._rows = limits.get("norms"), limits.get("rows")
        bounded = state.get("bounded", np.asarray(0, dtype=np.int64))
        if bounded.dtype != np.int64 or bounded.shape != () or bounded < 0:
            raise StateError("the number of bounded rows is no count")
        found.bounded_rows = int(bounded) if found._rows is not None else 0
        return found

    def _adaptive(self) -> dict[str, AdaptiveLimit]:
        known = {"norms": self._norms, "rows": self._rows}
        return {name: limit for name, limit in known.items() if limit is not None}
