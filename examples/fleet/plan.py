"""Who holds whose data, in which process, and how fast each class of devices pretends to be."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIMED_PER_CLASS = 6
"""So many devices of each class time themselves; the class takes the median of their ks."""

MEASURE_SECONDS = 60.0
"""The longest that a device may take for that, with its connections and its part in the round."""

HEADROOM = 0.2
"""A device's k has to fit into this much less than the time it is given (the SDK's default)."""
# All that a device may still have to do once everybody has timed itself.
_AFTERWARDS_SECONDS = 120.0
# The strongest class has time for so many times the columns that there are.
_ROOM = 1.6


@dataclass(frozen=True, slots=True)
class CapacityClass:
    """``about_k``: what such a device is throttled to afford. It measures for itself."""

    name: str
    about_k: int


# Evenly apart: much of a round's time does not depend on k, so that a little noise moves k a lot.
CLASSES = (
    CapacityClass("sensor", 20),
    CapacityClass("phone", 56),
    CapacityClass("tablet", 92),
    CapacityClass("desktop", 128),
)


def class_named(name: str) -> CapacityClass:
    """The class of that name. Raises StopIteration for another."""
    return next(each for each in CLASSES if each.name == name)


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """``users`` are rows of the data; ``process`` counts from 0.

    ``times``: it times itself and picks a k, for its class.
    """

    name: str
    capacity: str
    process: int
    users: tuple[int, ...]
    times: bool


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
            number < TIMED_PER_CLASS * len(CLASSES),
        )
        for number, users in enumerate(deal_users(interactions, devices))
    )


def deadline_seconds(plan: Sequence[PlannedDevice]) -> float:
    """The longest that a round may take.

    In the first one devices time themselves one after another. Each gets all the time that it may
    take, however slow broker and machine are: a round ends as soon as everybody has answered.
    """
    return _AFTERWARDS_SECONDS + MEASURE_SECONDS * sum(device.times for device in plan)


def budget_seconds(p90_seconds: Mapping[int, float], widest: int) -> float:
    """What a round's training is given, from what it takes on this machine, by k.

    Half as much again as the strongest class needs: it is slowed down, too, if only a little.
    """
    return 1.5 * _cost(p90_seconds, _ROOM * widest) / (1.0 - HEADROOM)


def slowdown(
    p90_seconds: Mapping[int, float], about_k: int, widest: int, train_seconds: float
) -> float:
    """How many times slower a device has to be to afford about ``about_k`` columns in time.

    ``p90_seconds``: what a round takes on this machine, by k.
    """
    wanted = _cost(p90_seconds, _ROOM * about_k if about_k >= widest else 1.1 * about_k)
    return max(1.0, train_seconds * (1.0 - HEADROOM) / wanted)


def _cost(seconds: Mapping[int, float], k: float) -> float:
    """By a curve through the times, which evens out noise: what a round takes grows with the square
    of k, too, or with k alone where the times bend the other way."""
    ks = np.array(sorted(seconds), np.float64)
    times: NDArray[np.float64] = np.array([seconds[int(k)] for k in ks])
    if len(ks) > 2:
        bend, slope, at_zero = (float(each) for each in np.polyfit(ks, times, 2))
        if bend > 0 and slope > 0:
            return max(at_zero, 0.0) + slope * k + bend * k * k
    slope, at_zero = np.polyfit(ks, times, 1)
    # A machine too noisy to show that more columns cost more still gets classes in their order.
    slope = max(float(slope), 1e-3 * float(times.mean()))
    return max(float(at_zero), 0.0) + slope * k
