"""Who holds whose data, in which process, and how fast each class of devices pretends to be."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLASSES", "CapacityClass", "PlannedDevice", "Throttles", "deal_users", "plan_devices",
           "throttles"]  # fmt: skip

HEADROOM = 0.2
"""A device's k has to fit into this much less than the time it is given (the SDK's default)."""


@dataclass(frozen=True, slots=True)
class CapacityClass:
    """``about_k``: what such a device is throttled to afford. It measures for itself."""

    name: str
    about_k: int


CLASSES = (
    CapacityClass("sensor", 8),
    CapacityClass("phone", 16),
    CapacityClass("tablet", 32),
    CapacityClass("desktop", 64),
)


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """``users`` are rows of the data; ``process`` counts from 0."""

    name: str
    capacity: str
    process: int
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Throttles:
    """The time that a round's training may take, and by class the emulated slowness."""

    train_seconds: float
    slowdown: Mapping[str, float]


def deal_users(interactions: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Share users out so that all devices hold about as many interactions.

    The work of a round is as large as the data. Equal shares leave the device's speed as the only
    reason for its k, which is what the demo is about.
    """
    if devices > len(interactions):
        raise ValueError(f"{devices} devices for {len(interactions)} users: some would hold nobody")
    lightest = [(0, device) for device in range(devices)]
    held: list[list[int]] = [[] for _ in range(devices)]
    for user in sorted(range(len(interactions)), key=lambda row: -interactions[row]):
        load, device = heapq.heappop(lightest)
        held[device].append(user)
        heapq.heappush(lightest, (load + interactions[user], device))
    return [tuple(sorted(users)) for users in held]


def plan_devices(
    interactions: Sequence[int], devices: int, processes: int
) -> tuple[PlannedDevice, ...]:
    """Every process holds devices of every class."""
    return tuple(
        PlannedDevice(
            f"device-{number + 1:02}",
            CLASSES[number % len(CLASSES)].name,
            number // len(CLASSES) % processes,
            users,
        )
        for number, users in enumerate(deal_users(interactions, devices))
    )


def throttles(p90_seconds: Mapping[int, float], widest: int) -> Throttles:
    """Slowness with which each class affords about its k.

    ``p90_seconds``: what a round's training took here, by k. A line through them evens out noise.
    The strongest class runs at this machine's speed.
    """
    ks = np.array(sorted(p90_seconds), np.float64)
    times: NDArray[np.float64] = np.array([p90_seconds[int(k)] for k in ks])
    slope, at_zero = np.polyfit(ks, times, 1)
    # A machine too noisy to show that more columns cost more still gets classes in their order.
    slope = max(float(slope), 1e-3 * float(times.mean()))
    at_zero = max(float(at_zero), 0.0)

    def cost(k: float) -> float:
        return at_zero + slope * k

    limit = 1.25 * cost(widest)
    slowdown = {
        each.name: 1.0 if each.about_k >= widest else limit / cost(1.15 * each.about_k + 1.0)
        for each in CLASSES
    }
    return Throttles(limit / (1.0 - HEADROOM), slowdown)
