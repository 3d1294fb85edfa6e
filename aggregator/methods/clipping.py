"""Bounds how far a single device can move the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import StateError

__all__ = ["AdaptiveLimit", "bounded_rows", "clip_factor", "euclidean_norm", "row_sizes"]

_WINDOW = 256
"""Norms that the running median is taken over: enough that a few hostile ones do not move it, few
enough that it follows norms that fall as the model settles."""

Floats = NDArray[np.float64]


def clip_factor(values: NDArray[Any], limit: float) -> float:
    """The factor, at most 1, that brings the Euclidean norm of ``values`` down to ``limit``.

    ``limit`` 0 means no limit. The norm is taken in float64: squares of finite float32 values
    cannot overflow there.
    """
    if limit == 0 or values.size == 0:
        return 1.0
    norm = euclidean_norm(values)
    return 1.0 if norm <= limit else limit / norm


def euclidean_norm(values: NDArray[Any]) -> float:
    """The norm of all of ``values``, taken in float64."""
    flat = values.reshape(-1).astype(np.float64)
    return math.sqrt(float(flat @ flat))


def row_sizes(values: NDArray[Any]) -> Floats:
    """Root mean square of each row, float64 [rows]: comparable whatever the number of columns."""
    wide = values.astype(np.float64)
    sizes: Floats = np.sqrt(np.einsum("ij,ij->i", wide, wide) / max(1, values.shape[1]))
    return sizes


def bounded_rows(
    values: NDArray[np.float32], sizes: Floats, limit: float
) -> tuple[NDArray[np.float32], int]:
    """``values`` [rows, columns] with rows above ``limit`` scaled down to it, and how many were.

    ``sizes`` are the rows' :func:`row_sizes`.
    """
    large = sizes > limit
    count = int(np.count_nonzero(large))
    if not count:
        return values, 0
    scale = np.ones(len(sizes), dtype=np.float32)
    scale[large] = (limit / sizes[large]).astype(np.float32)
    return values * scale[:, None], count


class AdaptiveLimit:
    """``multiple`` times the running median of the norms of the last 256 accepted updates.

    Norms count as they were before anything was scaled down, in the order of the commits, so the
    same updates in the same order give the same limits. Fewer than half of the updates, however
    large, cannot lift the median above the largest honest norm. A round that is given up leaves no
    trace: its updates are absorbed again by the next.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._settled: Floats = np.empty(0, dtype=np.float64)
        self._recent: Floats = self._settled

    def of(self, norm: float) -> float:
        """Take note of an accepted update's norm; the limit that holds for it.

        Infinite while the median is zero: no scale is known then.
        """
        self._recent = np.append(self._recent[-(_WINDOW - 1) :], norm)
        median = float(np.median(self._recent))
        return self._multiple * median if median > 0 else math.inf

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._recent = self._settled

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled = self._recent

    def state(self) -> dict[str, NDArray[Any]]:
        """``settled`` and ``recent``, float64 [at most 256]; copies."""
        return {"settled": self._settled.copy(), "recent": self._recent.copy()}

    @classmethod
    def from_state(cls, multiple: float, state: Mapping[str, NDArray[Any]]) -> AdaptiveLimit:
        """A limit that continues from ``state()``; an empty state is a fresh start, as where the
        option was just turned on. Raises StateError for anything else."""
        limit = cls(multiple)
        if not state:
            return limit
        if set(state) != {"settled", "recent"}:
            raise StateError(f"the limit's state holds {sorted(state)}; expected recent, settled")
        for name, norms in state.items():
            fits = norms.dtype == np.float64 and norms.ndim == 1 and len(norms) <= _WINDOW
            if not fits or not np.isfinite(norms).all() or (norms < 0).any():
                raise StateError(
                    f"the limit's {name!r} is {norms.dtype} {norms.shape}; expected at most "
                    f"{_WINDOW} finite float64, none below 0"
                )
        limit._settled, limit._recent = state["settled"].copy(), state["recent"].copy()
        return limit
