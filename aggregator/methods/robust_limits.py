"""What is done to every update before it counts: outliers are left out, rows and norms are held
within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.clipping import Measured, bounded_rows, measured
from aggregator.methods.fleet_scale import FleetScale
from aggregator.methods.method import StateError
from aggregator.methods.outliers import Outliers
from aggregator.methods.saved_state import part, require_array, require_count

__all__ = ["UpdateLimits"]

_FIRST_LENGTHS = 10.0
"""Lengths of the first model that an update may have while the fleet's norms are unknown: more
than a round of honest training moves a model, far too little to carry it out of a codec's range."""
_NORM, _ROW, _OTHERS = 0, 1, 2
_LENGTHS = 1
"""Of the other measures, those that are lengths and come first."""

Floats = NDArray[np.float32]


class UpdateLimits:
    """A fixed limit of an update's norm, a limit that follows the fleet, and one of single rows.

    Args:
        clip_norm: the largest Euclidean norm; 0 for no limit.
        clip_multiple: likewise, as a multiple of the fleet's median norm; see
            :class:`~aggregator.methods.fleet_scale.FleetScale`.
        row_multiple: the largest size of a row, as a multiple of the median of updates' median
            rows; for updates of two dimensions. Sizes are root mean squares, so a device that
            trains few columns is measured as one that trains many.
        outlier_multiple: an update of two dimensions that is out of line by more than this is left
            out; see :class:`~aggregator.methods.outliers.Outliers`.
        length: of the first model, Euclidean. Until three devices' norms are known, an update of a
            limit that follows may be ten times as long.
        others: further measures; see :meth:`most_length` and :meth:`usual`.

    Each is off at 0. Memory is that of a thousand numbers.
    """

    def __init__(
        self,
        clip_norm: float,
        clip_multiple: float = 0.0,
        row_multiple: float = 0.0,
        outlier_multiple: float = 0.0,
        *,
        length: float,
        others: int = 0,
    ) -> None:
        self._clip_norm = clip_norm
        self._clip_multiple = clip_multiple
        self._row_multiple = row_multiple
        self._outlier_multiple = outlier_multiple
        self._length = length
        self._others = others
        follows = bool(clip_multiple or row_multiple or others)
        self._scale = FleetScale(_OTHERS + others) if follows else None
        self._outliers = Outliers(outlier_multiple) if outlier_multiple else None
        self._bounded_rows = 0

    @property
    def known(self) -> bool:
        """Whether an update can be judged by the fleet: always, where no limit follows it."""
        return self._scale is None or self._scale.known

    def note(self, sender: str, found: Measured, others: Sequence[float] = ()) -> None:
        """Take note of an accepted update as it came, once, in commit order; one without any length
        says nothing of what is usual."""
        if self._scale is not None and (found.norm > 0 or any(others[:_LENGTHS])):
            row = found.median_row if self._row_multiple else 0.0
            self._scale.note(sender, (found.norm, row, *others))

    def apply(self, values: Floats, found: Measured, weight: float = 1.0) -> tuple[Floats, float]:
        """``values`` with large rows scaled down, and the factor, at most 1, that brings the whole
        update within the limits of its norm; 0 where it is an outlier. For an update that was
        noted, once, in commit order, with what was :func:`measured` of it. One that weighs more
        than usual, ``weight`` times, may be that much less long."""
        if self._outliers is not None and self._outliers.holds(values):
            return values, 0.0
        if not values.size:
            return values, 1.0
        if self._row_multiple and self._scale is not None and self._scale.known:
            most = self._row_multiple * self._scale.median(_ROW)
            if 0 < most < found.largest_row:
                values, count = bounded_rows(values, found.rows, most)
                self._bounded_rows += count
                found = measured(values)
        limit = self._clip_norm or math.inf
        if self._clip_multiple:
            following = self._following(_NORM, self._clip_multiple, self._length)
            limit = min(limit, following / max(1.0, weight))
        return values, 1.0 if found.norm <= limit else limit / found.norm

    def most_length(self, place: int, length: float) -> float:
        """The largest that another measure, a length, may be: ``clip_multiple`` times the fleet's
        median or, while that is unknown, ten times ``length``; infinite without the limit."""
        if not self._clip_multiple:
            return math.inf
        return self._following(_OTHERS + place, self._clip_multiple, length)

    def usual(self, place: int) -> float:
        """The median of another measure, over however few devices; 0 where nothing is known."""
        return 0.0 if self._scale is None else self._scale.median(_OTHERS + place)

    def metrics(self) -> dict[str, float]:
        """Of this round: ``bounded_rows`` that were scaled down, and ``outliers``, in so far as
        these limits are in use."""
        found: dict[str, float] = {}
        if self._row_multiple:
            found["bounded_rows"] = float(self._bounded_rows)
        if self._outliers is not None:
            found["outliers"] = float(self._outliers.count)
        return found

    def begin(self) -> None:
        """A round begins; what was noted in one that made no version is forgotten."""
        self._bounded_rows = 0
        for one in (self._scale, self._outliers):
            if one is not None:
                one.begin()

    def settle(self) -> None:
        """The round made a version."""
        for one in (self._scale, self._outliers):
            if one is not None:
                one.settle()

    def state(self) -> dict[str, NDArray[Any]]:
        """``fleet.*`` and ``outliers.*`` of what is in use, ``length`` float64 and ``bounded``
        int64, the rows."""
        found: dict[str, NDArray[Any]] = {}
        if self._scale is not None:
            found = {f"fleet.{name}": array for name, array in self._scale.state().items()}
            found["length"] = np.asarray(self._length, dtype=np.float64)
        if self._row_multiple:
            found["bounded"] = np.asarray(self._bounded_rows, dtype=np.int64)
        if self._outliers is not None:
            outliers = self._outliers.state()
            found.update({f"outliers.{name}": array for name, array in outliers.items()})
        return found

    def continued(self, state: Mapping[str, NDArray[Any]]) -> UpdateLimits:
        """Limits with these settings that continue from ``state()``; this object is unchanged.

        A limit that the state does not know starts afresh, and what is no longer in use is dropped:
        the options may change between rounds. Raises StateError for arrays that do not fit.
        """
        found = UpdateLimits(
            self._clip_norm,
            self._clip_multiple,
            self._row_multiple,
            self._outlier_multiple,
            length=self._length,
            others=self._others,
        )
        if found._scale is not None:
            measures = _OTHERS + self._others
            found._scale = FleetScale.from_state(measures, part("fleet.", state))
            if "length" in state:
                require_array(state["length"], "length", np.float64, ())
                if not (np.isfinite(state["length"]) and state["length"] >= 0):
                    raise StateError("the state's 'length' is no length")
                found._length = float(state["length"])
        if self._row_multiple and "bounded" in state:
            found._bounded_rows = require_count(state["bounded"], "bounded rows")
        if found._outliers is not None:
            found._outliers = Outliers.from_state(self._outlier_multiple, part("outliers.", state))
        return found

    def _following(self, measure: int, multiple: float, length: float) -> float:
        assert self._scale is not None
        median = self._scale.median(measure) if self._scale.known else 0.0
        # Where most devices send zeros, or too few are known, there is no scale but the model's.
        return multiple * median if median else _FIRST_LENGTHS * max(length, 1.0)
