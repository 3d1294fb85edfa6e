"""HR@10 and NDCG@10: on a device for its own users, and summed up for the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from examples.fleet.journal import RoundQuality

CUT = 10
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FleetQuality:
    """Means over ``users``: HR@10 and NDCG@10 among all items, and among 99 negatives."""

    users: int
    full_hit_ratio: float
    full_ndcg: float
    hit_ratio: float
    ndcg: float

    @classmethod
    def of(cls, users: Floats, items: Floats, split: LeaveOneOut) -> Self:
        """Of these vectors of users and items."""
        full = quality(full_ranks(users, items, split), CUT)
        among_99 = quality(sampled_ranks(users, items, split), CUT)
        return cls(split.users, full.hit_ratio, full.ndcg, among_99.hit_ratio, among_99.ndcg)


def device_quality(
    device: str,
    capacity: str,
    round_id: int,
    k: int,
    users: Floats,
    items: Floats,
    split: LeaveOneOut,
) -> RoundQuality:
    """Quality of a device's vectors for the users of ``split``, which are its own.

    ``users`` float32 [users, K] in the order of ``split``, ``items`` [items, K].
    """
    found = FleetQuality.of(users, items, split)
    return RoundQuality(
        *(device, capacity, round_id, k, split.users),
        round(found.full_hit_ratio * split.users),
        found.full_ndcg * split.users,
        round(found.hit_ratio * split.users),
        found.ndcg * split.users,
    )


class QualityTable:
    """Collects the devices' sums, by round."""

    def __init__(self) -> None:
        self._by_round: dict[int, dict[str, RoundQuality]] = {}

    def add(self, record: RoundQuality) -> None:
        """A device evaluated a round; a second time replaces the first."""
        self._by_round.setdefault(record.round, {})[record.device] = record

    def rounds(self, least_devices: int = 1) -> list[int]:
        """Rounds that at least so many devices evaluated, rising."""
        return sorted(
            round_id for round_id, held in self._by_round.items() if len(held) >= least_devices
        )

    def at(self, round_id: int, capacity: str | None = None) -> FleetQuality | None:
        """The fleet's quality, or that of one class; None where nobody evaluated the round."""
        held: Mapping[str, RoundQuality] = self._by_round.get(round_id, {})
        return _mean(each for each in held.values() if capacity in (None, each.capacity))


def _mean(records: Iterable[RoundQuality]) -> FleetQuality | None:
    chosen = list(records)
    users = sum(each.users for each in chosen)
    if users == 0:
        return None
    return FleetQuality(
        users,
        *(
            sum(getattr(each, name) for each in chosen) / users
            for name in ("full_hits", "full_gain", "hits", "gain")
        ),
    )
