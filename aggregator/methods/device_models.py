"""The last model of each device that the aggregator has heard of lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import Entry, RestoreError, State, Stateful, unpack


@dataclass(frozen=True, slots=True, eq=False)
class HeardModel:
    """One device's: see :class:`DeviceModels`."""

    sender: str
    vector: NDArray[np.float32]
    width: int
    samples: int
    round_id: int
    asks: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModels(Stateful):
    """n devices, in the order in which they were first heard of; never changed, only replaced.

    ``senders``: names. ``vectors`` float32 [n, p]: in the widest layout, zero where a model has
    nothing. ``widths``, ``samples``, ``rounds`` int64 [n]: the model's layout, its training
    samples, and the round that it came in. ``asks`` bool [n]: the device leaves mixing to the
    aggregator.
    """

    senders: tuple[str, ...]
    vectors: NDArray[np.float32]
    widths: NDArray[np.int64]
    samples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    asks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.senders)

    @property
    def sender_bytes(self) -> NDArray[np.uint8]:
        """The names as uint8 [n, 16]."""
        return _to_bytes(self.senders)

    @classmethod
    def of(cls, models: Sequence[HeardModel], size: int) -> DeviceModels:
        """In the order given; each device at most once, each vector of ``size`` numbers."""
        vectors = [model.vector for model in models]
        return cls(
            tuple(model.sender for model in models),
            np.stack(vectors) if vectors else np.empty((0, size), dtype=np.float32),
            np.asarray([model.width for model in models], dtype=np.int64),
            np.asarray([model.samples for model in models], dtype=np.int64),
            np.asarray([model.round_id for model in models], dtype=np.int64),
            np.asarray([model.asks for model in models], dtype=np.bool_),
        )

    def each(self) -> list[HeardModel]:
        """One by one."""
        columns = (self.vectors, self.widths, self.samples, self.rounds, self.asks)
        return [
            HeardModel(name, vector, int(width), int(samples), int(round_id), bool(asks))
            for name, vector, width, samples, round_id, asks in zip(
                self.senders, *columns, strict=True
            )
        ]

    def updated(self, newer: DeviceModels) -> DeviceModels:
        """These, with ``newer`` models in the place of the same devices' older ones."""
        places = {name: row for row, name in enumerate(self.senders)}
        fresh = [row for row, name in enumerate(newer.senders) if name not in places]
        held = [row for row, name in enumerate(newer.senders) if name in places]
        rows = [places[newer.senders[row]] for row in held]

        def join(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
            found = np.concatenate([old, new[fresh]])
            found[rows] = new[held]
            return found

        return DeviceModels(
            (*self.senders, *(newer.senders[row] for row in fresh)),
            join(self.vectors, newer.vectors),
            join(self.widths, newer.widths),
            join(self.samples, newer.samples),
            join(self.rounds, newer.rounds),
            join(self.asks, newer.asks),
        )

    def younger_than(self, round_id: int) -> DeviceModels:
        """Those that came after ``round_id``."""
        return self.those(self.rounds > round_id)

    def those(self, kept: NDArray[np.bool_]) -> DeviceModels:
        """The devices for which ``kept``, bool [n], is true."""
        rows = np.flatnonzero(kept)
        return DeviceModels(
            tuple(self.senders[row] for row in rows),
            self.vectors[rows],
            self.widths[rows],
            self.samples[rows],
            self.rounds[rows],
            self.asks[rows],
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """``senders`` uint8 [n, 16] and the arrays, by their names; copies."""
        return {
            "senders": self.sender_bytes,
            "vectors": self.vectors.copy(),
            "widths": self.widths.copy(),
            "samples": self.samples.copy(),
            "rounds": self.rounds.copy(),
            "asks": self.asks.copy(),
        }

    def restored(self, state: State) -> DeviceModels:
        """Models of as many numbers as these; raises RestoreError where the state is not theirs."""
        schema = {
            "senders": Entry(np.uint8, ("devices", 16)),
            "vectors": Entry(np.float32, ("devices", self.vectors.shape[1])),
            "widths": Entry(np.int64, ("devices",), least=0),
            "samples": Entry(np.int64, ("devices",)),
            "rounds": Entry(np.int64, ("devices",)),
            "asks": Entry(np.bool_, ("devices",)),
        }
        arrays = unpack(schema, state)
        senders = tuple(row.tobytes().hex() for row in arrays.pop("senders"))
        if len(set(senders)) != len(senders):
            raise RestoreError("the state's 'senders' name a device twice")
        return DeviceModels(senders, **arrays)


def _to_bytes(senders: tuple[str, ...]) -> NDArray[np.uint8]:
    raw = bytes.fromhex("".join(senders))
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(senders), 16).copy()
