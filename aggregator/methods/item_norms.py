"""Holds every item's vector to the length that is usual for items touched as often.

In a factorisation of rankings the length of an item's vector stands for its popularity, and so does
the number of devices that touch its row: the more users like it, the more send it. Whoever promotes
an item, with pushes that are honest by size, makes a vector longer than its touches explain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import Entry, Schema, Stateful

_ALIKE = 64
"""Items whose median is compared with, the nearest in number of touches."""

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]


class ItemNorms(Stateful):
    """Counts who touches a row, and scales down rows that are too long for it.

    The items that were touched are ranked by how many accepted updates did so, ever, and divided
    into groups of about 64 neighbours. A row may be ``multiple`` times as long as the median of its
    group.

    Args:
        multiple: of the group's median Euclidean norm.
        items: rows of the matrix.

    A round that is given up leaves no trace. Memory is two integers an item.
    """

    FRESH = True

    def __init__(self, multiple: float, items: int) -> None:
        self._multiple = multiple
        self._items = items
        self._settled: Counts = np.zeros(items, dtype=np.int64)
        self._recent: Counts = np.zeros(items, dtype=np.int64)
        self.count = 0
        """Rows that the last call of :meth:`bounded` scaled down."""

    def note(self, rows: Counts) -> None:
        """An accepted update touched these distinct rows."""
        self._recent[rows] += 1

    def bounded(self, matrix: Floats) -> Floats:
        """``matrix`` [items, K] with the rows that are too long scaled down."""
        touches = self._settled + self._recent
        order = np.argsort(touches, kind="stable")[np.count_nonzero(touches == 0) :]
        norms = np.linalg.norm(matrix.astype(np.float64), axis=1)
        limits = np.full_like(norms, np.inf)
        for group in np.array_split(order, max(1, len(order) // _ALIKE)):
            usual = np.median(norms[group]) if len(group) else 0.0
            # Where most are still zero, there is no scale.
            limits[group] = self._multiple * usual if usual > 0 else np.inf
        long = norms > limits
        self.count = int(np.count_nonzero(long))
        if not self.count:
            return matrix
        scale = np.ones(len(norms), dtype=np.float32)
        scale[long] = (limits[long] / norms[long]).astype(np.float32)
        return matrix * scale[:, None]

    def begin(self) -> None:
        """A round begins: forget what came since the last one that ended."""
        self._recent = np.zeros_like(self._settled)

    def settle(self) -> None:
        """The round made a version: what came in it stays."""
        self._settled = self._settled + self._recent
        self._recent = np.zeros_like(self._settled)

    def grow(self, items: int) -> None:
        """Append ``items`` rows that nobody has touched."""
        fresh = np.zeros(items, dtype=np.int64)
        self._items += items
        self._settled = np.concatenate([self._settled, fresh])
        self._recent = np.concatenate([self._recent, fresh])

    def _schema(self) -> Schema:
        return dict.fromkeys(("settled", "recent"), Entry(np.int64, (self._items,), least=0))
