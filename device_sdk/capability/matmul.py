"""The quick probe of the patent (paragraph 20): one product of factor matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class MatmulWorkload:
    """[items, k] x [k, users] in float32.

    Much cheaper to time than a train step and, as it has no gathering, loss, gradient or update,
    only a hint of what a step takes. numpy's own thread settings apply.
    """

    def __init__(self, *, items: int, users: int, rng: np.random.Generator) -> None:
        self._items = items
        self._users = users
        self._rng = rng
        self._left: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._right: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Draw factors for `k`, with `share` of the items."""
        items = max(1, round(self._items * share))
        self._left = self._rng.standard_normal((items, k), dtype=np.float32)
        self._right = self._rng.standard_normal((k, self._users), dtype=np.float32)

    def run(self) -> NDArray[np.float32]:
        """One product, [items, users]."""
        product: NDArray[np.float32] = self._left @ self._right
        return product
