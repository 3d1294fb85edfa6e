"""Updates that wait until enough is known of the fleet to judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import StateError
from device_sdk.wire.arrays.exchange import Scalar, Update

__all__ = ["Waiting"]

_MOST = 16
"""A few: they come of devices of which too few are known, and each is held whole."""


class Waiting:
    """The first updates of a task's life, in the order of their commits."""

    def __init__(self) -> None:
        self._updates: list[Update] = []

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def full(self) -> bool:
        """Whether no further update can wait."""
        return len(self._updates) >= _MOST

    def add(self, update: Update) -> None:
        """Hold a copy: the caller's arrays may be views of a buffer that is used again."""
        copies = {name: array.copy() for name, array in update.tensors.items()}
        self._updates.append(Update(update.round_id, copies, update.metadata, update.sender))

    def take(self) -> Iterator[Update]:
        """All of them; they wait no longer."""
        updates, self._updates = self._updates, []
        yield from updates

    def state(self) -> dict[str, NDArray[Any]]:
        """Of update i: ``i.round`` int64, ``i.sender`` uint8 of the sender's letters,
        ``i.tensor.*`` and, as scalars, ``i.said.*``; nothing where none waits."""
        found: dict[str, NDArray[Any]] = {}
        for place, update in enumerate(self._updates):
            found[f"{place}.round"] = np.asarray(update.round_id, dtype=np.int64)
            found[f"{place}.sender"] = np.frombuffer(update.sender.encode(), dtype=np.uint8)
            for name, array in update.tensors.items():
                found[f"{place}.tensor.{name}"] = array.copy()
            for name, value in update.metadata.items():
                found[f"{place}.said.{name}"] = np.asarray(value)
        return found

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Waiting:
        """What ``state()`` held; raises StateError for anything else."""
        found = cls()
        rest = dict(state)
        while rest:
            prefix = f"{len(found)}."
            own = {n.removeprefix(prefix): rest.pop(n) for n in list(rest) if n.startswith(prefix)}
            try:
                found._updates.append(_update(own))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise StateError(f"an update that waits cannot be read: {error!r}") from None
        return found


def _update(own: dict[str, NDArray[Any]]) -> Update:
    said: dict[str, Scalar] = {}
    tensors: dict[str, NDArray[Any]] = {}
    for name, array in own.items():
        kind, _, rest = name.partition(".")
        if kind == "tensor":
            tensors[rest] = array.copy()
        elif kind == "said":
            said[rest] = array.item()
    sender = own["sender"].tobytes().decode()
    return Update(int(own["round"]), tensors, said, sender)
