"""What hostile devices do, whatever the method, and which devices are hostile."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Attack = Literal["flip", "noise", "promotion", "patient", "opposite", "pattern", "row"]
ATTACKS: tuple[Attack, ...] = ("flip", "noise", "promotion", "patient")
PROMOTING: tuple[Attack, ...] = ("promotion", "patient")
"""Attacks that want an item recommended."""

SINGLE: tuple[Attack, ...] = ("opposite", "pattern", "row")
"""Attacks of one device that takes part in every round, of any magnitude."""
MAGNITUDES = (1.0, 1e3, 1e11)

SHARES = (0.05, 0.2)
"""Of the devices, that are hostile."""
STRENGTH = np.float32(10.0)
"""How much larger than an honest update a loud attack is."""
_FEW = 5


def hostile_devices(order: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The first ``share`` of ``order``: a larger share holds the devices of a smaller one."""
    return order[: round(share * len(order))]


def unpopular_item(known: NDArray[np.int64], rng: np.random.Generator) -> int:
    """One of the items that at least one and at most five users know; ``known`` [items] counts."""
    return int(rng.choice(np.flatnonzero((known >= 1) & (known <= _FEW))))


def noise_like(values: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """Normal noise of the shape of ``values`` and ``STRENGTH`` times their norm."""
    noise = rng.standard_normal(values.shape, dtype=np.float32)
    scaled = noise * (STRENGTH * np.linalg.norm(values) / np.linalg.norm(noise))
    return scaled.astype(np.float32)
