"""What is done to every update before it counts: outliers are left out, rows and norms are held
within limits."""

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
from aggregator.methods.outliers import Outliers
from aggregator.methods.saved_state import part, require_count

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
        outlier_multiple: an update of two dimensions that is out of line by more than this is left
            out; see :class:`~aggregator.methods.outliers.Outliers`.

    Each is off at 0. Memory is that of a thousand numbers.
    """

    def __init__(
        self,
        clip_norm: float,
        clip_multiple: float = 0.0,
        row_multiple: float = 0.0,
        outlier_multiple: float = 0.0,
    ) -> None:
        self._clip_norm = clip_norm
        self._norms = AdaptiveLimit(clip_multiple) if clip_multiple else None
        self._rows = AdaptiveLimit(row_multiple) if row_multiple else None
        self._outliers = Outliers(outlier_multiple) if outlier_multiple else None
        self._multiples = {
            "norms": clip_multiple,
            "rows": row_multiple,
            "outliers": outlier_multiple,
        }
        self._bounded_rows = 0

    def apply(self, values: Floats) -> tuple[Floats, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm; 0 where it is an outlier, which no other limit takes
        note of. For an accepted update, once, in commit order."""
        if self._outliers is not None and self._outliers.holds(values):
            return values, 0.0
        limit = self._clip_norm
        if values.size and self._rows is not None:
            sizes = row_sizes(values)
            of_row = self._rows.of(float(np.median(sizes)))
            values, count = bounded_rows(values, sizes, of_row)
            self._bounded_rows += count
        if values.size and self._norms is not None:
            of_norm = self._norms.of(euclidean_norm(values))
            limit = min(limit, of_norm) if limit else of_norm
        return values, clip_factor(values, limit)

    def metrics(self) -> dict[str, float]:
        """Of this round: ``bounded_rows`` that were scaled down, and ``outliers``, in so far as
        these limits are in use."""
        found: dict[str, float] = {}
        if self._rows is not None:
            found["bounded_rows"] = float(self._bounded_rows)
        if self._outliers is not None:
            found["outliers"] = float(self._outliers.count)
        return found

    def begin(self) -> None:
        """A round begins; what was noted in one that made no version is forgotten."""
        self._bounded_rows = 0
        for one in self._following().values():
            one.begin()

    def settle(self) -> None:
        """The round made a version."""
        for one in self._following().values():
            one.settle()

    def state(self) -> dict[str, NDArray[Any]]:
        """``norms.*``, ``rows.*`` and ``outliers.*`` of what is in use, and ``bounded`` int64
        scalar with the rows."""
        found = {
            f"{name}.{key}": array
            for name, one in self._following().items()
            for key, array in one.state().items()
        }
        if self._rows is not None:
            found["bounded"] = np.asarray(self._bounded_rows, dtype=np.int64)
        return found

    def continued(self, state: Mapping[str, NDArray[Any]]) -> UpdateLimits:
        """Limits with these settings that continue from ``state()``; this object is unchanged.

        A limit that the state does not know starts afresh, and what is no longer in use is dropped:
        the options may change between rounds. Raises StateError for arrays that do not fit.
        """
        norms, rows, outliers = (self._multiples[name] for name in ("norms", "rows", "outliers"))
        found = UpdateLimits(self._clip_norm, norms, rows, outliers)
        if norms:
            found._norms = AdaptiveLimit.from_state(norms, part("norms.", state))
        if rows:
            found._rows = AdaptiveLimit.from_state(rows, part("rows.", state))
            if "bounded" in state:
                found._bounded_rows = require_count(state["bounded"], "bounded rows")
        if outliers:
            found._outliers = Outliers.from_state(outliers, part("outliers.", state))
        return found

    def _following(self) -> dict[str, AdaptiveLimit | Outliers]:
        known = {"norms": self._norms, "rows": self._rows, "outliers": self._outliers}
        return {name: one for name, one in known.items() if one is not None}
