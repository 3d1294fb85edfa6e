"""A weighted mean of vectors that arrive one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import StateError

__all__ = ["WeightedMean"]


class WeightedMean:
    """Sums in float64, so that a hundred thousand float32 vectors keep their small entries."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, dtype=np.float64)
        self._weight = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        """The number of vectors."""
        return self._count

    @property
    def weight(self) -> float:
        """Their weights' sum."""
        return self._weight

    def add(self, values: NDArray[np.float32], weight: float) -> None:
        """Add one vector, float32 [size], with a weight above 0."""
        self._sum += values.astype(np.float64) * weight
        self._weight += weight
        self._count += 1

    def mean(self) -> NDArray[np.float32]:
        """float32 [size]; zeros before the first vector."""
        if self._count == 0:
            return np.zeros(len(self._sum), dtype=np.float32)
        return (self._sum / self._weight).astype(np.float32)

    def state(self) -> dict[str, NDArray[Any]]:
        """``sum`` float64 [size], ``weight`` float64 scalar, ``count`` int64 scalar; copies."""
        return {
            "sum": self._sum.copy(),
            "weight": np.asarray(self._weight, dtype=np.float64),
            "count": np.asarray(self._count, dtype=np.int64),
        }

    @classmethod
    def from_state(cls, size: int, state: Mapping[str, NDArray[Any]]) -> WeightedMean:
        """A mean that continues from ``state()``; raises StateError where it cannot."""
        found = cls(size)
        expected = found.state()
        if set(state) != set(expected):
            raise StateError(f"the mean's state holds {sorted(state)}; expected count, sum, weight")
        for name, wanted in expected.items():
            if state[name].dtype != wanted.dtype or state[name].shape != wanted.shape:
                raise StateError(
                    f"the mean's {name!r} is {state[name].dtype} {state[name].shape}; expected "
                    f"{wanted.dtype} {wanted.shape}"
                )
        found._sum = state["sum"].copy()
        found._weight, found._count = float(state["weight"]), int(state["count"])
        return found
