"""Which fault befalls which packet: a function of the seed, the client and the packet's number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import numpy as np


class WireFault(Enum):
    """What can happen to a packet between a client and the broker."""

    DELAY = "delayed"
    CUT = "connection cut"
    HALVE = "halved, then cut"
    DUPLICATE = "packet doubled"
    REPLAY = "old packet repeated"
    SWALLOW = "packet swallowed"
    REORDER = "packets swapped"
    CORRUPT = "bit flipped"
    HALF_OPEN = "left half-open"
    DRIBBLE = "dribbled in pieces"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each fault for one packet. Raises ValueError unless they sum to below 1."""

    delay: float = 0.03
    cut: float = 0.004
    halve: float = 0.003
    duplicate: float = 0.03
    replay: float = 0.03
    swallow: float = 0.01
    reorder: float = 0.02
    corrupt: float = 0.01
    half_open: float = 0.001
    dribble: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= sum(self.in_order()) < 1:
            raise ValueError("the faults' probabilities must sum to at least 0 and below 1")

    def in_order(self) -> list[float]:
        """In the order of :class:`WireFault`."""
        return [
            self.delay,
            self.cut,
            self.halve,
            self.duplicate,
            self.replay,
            self.swallow,
            self.reorder,
            self.corrupt,
            self.half_open,
            self.dribble,
        ]


class Schedule:
    """The faults of one direction of one connection.

    Drawn from (seed, client, how many connections it made before, direction) alone, so that the
    same run meets the same faults at the same packets, whatever the machine's timing does to the
    rest.
    """

    def __init__(
        self, seed: int, client: str, connection: int, direction: str, rates: FaultRates
    ) -> None:
        name = f"{seed} {client} {connection} {direction}".encode()
        drawn = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
        self.rng = np.random.default_rng(drawn)
        self._faults = list(WireFault)
        self._edges = np.cumsum(rates.in_order())

    def next(self) -> WireFault | None:
        """What happens to the next packet."""
        place = int(np.searchsorted(self._edges, self.rng.random(), side="right"))
        return self._faults[place] if place < len(self._faults) else None
