"""What hostile devices do, whatever the method, and which devices are hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import Learner, State
from device_sdk.wire.arrays.exchange import Broadcast, Update

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


_MOST_CLAIMED = 1 << 40
_LARGEST = 1e12
"""Larger values are refused."""


class HostileLearner(Learner):
    """Trains as an honest device would, and sends something else.

    ``flip`` sends ten times the opposite of what was found. ``noise`` sends normal noise of ten
    times the norm of each array. ``promotion`` sends ten times what was learnt, and ``patient``
    just that: their learner is given samples in which an item is always clicked.

    Args:
        honest: the device's real learner.
        attack: what is done to its updates.
        rng: draws the noise.
    """

    def __init__(self, honest: Learner, attack: Attack, rng: np.random.Generator) -> None:
        self._honest = honest
        self._attack = attack
        self._rng = rng

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if not all(array.size for array in update.tensors.values()):
            return update
        if self._attack == "flip":
            tensors = _floats(update.tensors, lambda array: array * -STRENGTH)
        elif self._attack == "noise":
            tensors = _floats(update.tensors, lambda array: noise_like(array, self._rng))
        else:
            strength = np.float32(1.0) if self._attack == "patient" else STRENGTH
            tensors = self._promoting(update.tensors, broadcast, strength)
        return replace(update, tensors=tensors)

    def _promoting(
        self, tensors: State, broadcast: Broadcast, strength: np.float32
    ) -> dict[str, NDArray[Any]]:
        return _floats(tensors, lambda array: array * strength)


def _floats(
    tensors: State, change: Callable[[NDArray[np.float32]], NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The arrays, those of float32 changed: others say what they are of."""
    return {
        name: change(array) if array.dtype == np.float32 else array
        for name, array in tensors.items()
    }


class AnyValue(Learner):
    """``opposite`` sends the opposite of what an honest device found, times ``magnitude``.

    ``pattern`` sends random signs times ``magnitude`` in all that it may send, the same in every
    round, so that they add up; ``row`` the same in a single row of the first array. Where samples
    are claimed, each claims as many as it may.

    Args:
        honest: the device's real learner.
        attack: what is sent.
        magnitude: how large.
        rng: draws the signs.
    """

    def __init__(
        self, honest: Learner, attack: Attack, magnitude: float, rng: np.random.Generator
    ) -> None:
        self._honest = honest
        self._attack = attack
        self._magnitude = np.float32(magnitude)
        self._rng = rng
        self._signs: dict[str, NDArray[Any]] = {}

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        update = self._honest.train(broadcast)
        if self._attack == "opposite":
            tensors = _floats(update.tensors, self._opposite)
        elif "items" in broadcast.tensors:
            tensors = self._of_items(broadcast.tensors["items"].shape)
        else:
            tensors = self._of_model(update.tensors)
        claims = {"samples": _MOST_CLAIMED} if "samples" in update.metadata else {}
        return replace(update, tensors=tensors, metadata={**update.metadata, **claims})

    def _opposite(self, array: NDArray[np.float32]) -> NDArray[Any]:
        opposite: NDArray[Any] = np.clip(-self._magnitude * array, -_LARGEST, _LARGEST)
        return opposite.astype(np.float32)

    def _of_items(self, shape: tuple[int, ...]) -> State:
        rows = np.arange(1 if self._attack == "row" else shape[0], dtype=np.int64)
        values = self._drawn("items", shape)[: len(rows)]
        return {"rows": rows, "columns": np.arange(shape[1], dtype=np.int64), "values": values}

    def _of_model(self, tensors: State) -> State:
        found = {name: self._drawn(name, array.shape) for name, array in tensors.items()}
        if self._attack == "row":
            for place, name in enumerate(sorted(found)):
                found[name][0 if place else 1 :] = 0
        return found

    def _drawn(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if name not in self._signs:
            self._signs[name] = self._rng.choice([-1.0, 1.0], size=shape).astype(np.float32)
        drawn: NDArray[np.float32] = self._signs[name] * self._magnitude
        return drawn
