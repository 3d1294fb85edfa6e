"""How much of the model this device can afford."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from device_sdk.capability.machine import Machine, describe_machine
from device_sdk.capability.matmul import MatmulWorkload
from device_sdk.capability.search import Found, find_largest_k
from device_sdk.capability.stopwatch import (
    BlockSize,
    Measurement,
    Stopwatch,
    Workload,
    checked_slowdown,
)
from device_sdk.capability.train_step import TrainStepWorkload
from device_sdk.system.clock import Clock, MonotonicClock

Method = Literal["train_step", "matmul"]
WhenNoneFits = Literal["one", "decline"]


@dataclass(frozen=True)
class Request:
    """What is asked: the largest k in 1 to `max_k` for work that has to end within a deadline.

    A k fits when its p90 is at most `limit_seconds`, (1 - headroom) x the deadline.
    `time_box_seconds` bounds the whole measurement; `slowdown` emulates a device that many times
    slower.
    """

    deadline_seconds: float
    max_k: int = 64
    headroom: float = 0.2
    time_box_seconds: float = 10.0
    slowdown: float = 1.0
    when_none_fits: WhenNoneFits = "one"

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "time_box_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} is {value}; expected a finite number above 0")
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(
                f"headroom is {self.headroom}; expected 0 <= headroom < 1 (0.2 is 20 %)"
            )
        if self.max_k < 1:
            raise ValueError(f"max_k is {self.max_k}; expected 1 or more")
        if self.when_none_fits not in ("one", "decline"):
            raise ValueError(
                f'when_none_fits is {self.when_none_fits!r}; expected "one" or "decline"'
            )
        checked_slowdown(self.slowdown)

    @property
    def limit_seconds(self) -> float:
        """What a k's p90 may be."""
        return self.deadline_seconds * (1.0 - self.headroom)


@dataclass(frozen=True)
class Choice:
    """The chosen k, why, and everything that was measured on the way.

    `k` is None where the device declines. `fits`: the chosen k fits; `confirmed`: measured again
    after the search, it kept the deadline and, but for noise, the limit. `load_seconds` is reading
    the artifact and making its session, which happens once and is in no other figure.
    """

    k: int | None
    reason: str
    fits: bool
    confirmed: bool
    request: Request
    method: Method
    measurements: tuple[Measurement, ...]
    load_seconds: float
    elapsed_seconds: float
    machine: Machine

    def at(self, k: int) -> Measurement | None:
        """What was measured at `k`."""
        return next((entry for entry in self.measurements if entry.k == k), None)


def choose_latent_dimension(
    artifact: str | os.PathLike[str],
    *,
    deadline_seconds: float,
    items: int,
    interactions: int,
    users: int = 1,
    batch: int | None = None,
    max_k: int = 64,
    headroom: float = 0.2,
    time_box_seconds: float = 10.0,
    method: Method = "train_step",
    slowdown: float = 1.0,
    when_none_fits: WhenNoneFits = "one",
    threads: int = 1,
    providers: str | Sequence[str] = "auto",
    clock: Clock | None = None,
    rng: np.random.Generator | None = None,
    progress: Callable[[Measurement], None] | None = None,
) -> Choice:
    """The largest latent dimension with which an epoch fits the deadline on this device.

    Times the artifact's own train step on `items` x k and `users` x k factors and `interactions`
    triples (in steps of `batch`; None is one step), as "Request" and "Choice" describe.
    `method="matmul"` times the product [items, k] x [k, users] instead: the quick probe of the
    patent (paragraph 20), which says little about a train step. The default `rng` has a fixed seed.

    Raises ValueError for impossible arguments, ArtifactError for an artifact that is no matrix
    factorisation, ProviderError where the providers cannot be used.
    """
    request = Request(deadline_seconds, max_k, headroom, time_box_seconds, slowdown, when_none_fits)
    for name, value in {"items": items, "interactions": interactions, "users": users}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}; expected 1 or more triples, or None for one step")
    clock = MonotonicClock() if clock is None else clock
    rng = np.random.default_rng(0) if rng is None else rng
    start = clock.now()
    if method == "matmul":
        workload: Workload = MatmulWorkload(items=items, users=users, rng=rng)
        provider = "numpy"
    elif method == "train_step":
        workload = TrainStepWorkload(
            artifact,
            items=items,
            interactions=interactions,
            users=users,
            batch=batch,
            providers=providers,
            threads=threads,
            rng=rng,
        )
        provider, threads = workload.provider, workload.threads
    else:
        raise ValueError(f'method is {method!r}; expected "train_step" or "matmul"')
    machine = describe_machine(threads=threads, provider=provider)
    return choose_k(
        workload,
        request,
        machine=machine,
        clock=clock,
        method=method,
        start=start,
        progress=progress,
    )


def choose_k(
    workload: Workload,
    request: Request,
    *,
    machine: Machine,
    clock: Clock,
    method: Method = "train_step",
    start: float | None = None,
    block: BlockSize | None = None,
    progress: Callable[[Measurement], None] | None = None,
) -> Choice:
    """The largest k with which any workload fits; `start` is when the time box began (now)."""
    started = clock.now()
    start = started if start is None else start
    stopwatch = Stopwatch(
        workload,
        clock,
        stop_at=start + request.time_box_seconds,
        give_up_seconds=request.limit_seconds,
        block=_block_for(request.time_box_seconds) if block is None else block,
        slowdown=request.slowdown,
        progress=progress,
    )
    impression = stopwatch.first_impression()
    # Twice: a cold start and one steady run are the least that says anything.
    if 2.0 * impression > stopwatch.seconds_left():
        found = Found(0, confirmed=False, out_of_time=True)
    else:
        found = find_largest_k(
            stopwatch,
            limit_seconds=request.limit_seconds,
            deadline_seconds=request.deadline_seconds,
            max_k=request.max_k,
        )
    measurements = stopwatch.measurements()
    k = found.k if found.k > 0 else (1 if request.when_none_fits == "one" else None)
    return Choice(
        k=k,
        reason=_reason(request, found, measurements, impression),
        fits=found.k > 0,
        confirmed=found.confirmed,
        request=request,
        method=method,
        measurements=measurements,
        load_seconds=started - start,
        elapsed_seconds=clock.now() - start,
        machine=machine,
    )


def _block_for(time_box_seconds: float) -> BlockSize:
    """Blocks of which some forty fit into the time box, even of slow runs."""
    return BlockSize(
        min_seconds=min(0.1, time_box_seconds / 100.0), max_seconds=time_box_seconds / 40.0
    )


def _reason(
    request: Request, found: Found, measurements: tuple[Measurement, ...], impression: float
) -> str:
    limit = (
        f"{_shown(request.limit_seconds)} ({1.0 - request.headroom:.0%} of the "
        f"{_shown(request.deadline_seconds)} deadline)"
    )
    cut = f" The time box of {_shown(request.time_box_seconds)} ended the search early."
    if found.k == 0:
        answer = (
            "k = 1 is taken all the same, as asked"
            if request.when_none_fits == "one"
            else "the device declines, as asked"
        )
        first = next((entry.p90_seconds for entry in measurements if entry.k == 1), None)
        if first is not None:
            return f"Even k = 1 misses: its p90 is {_shown(first)}, the limit {limit}; {answer}."
        if math.isfinite(impression):
            took = f"one run at k = 1 would take about {_shown(impression)}"
        else:
            took = "not even a small share of one run at k = 1 ended inside it"
        return (
            f"The time box of {_shown(request.time_box_seconds)} is too short to measure anything: "
            f"{took}. Nothing is known to fit; {answer}."
        )
    chosen = next(entry for entry in measurements if entry.k == found.k)
    why = f"k = {found.k} takes {_shown(chosen.p90_seconds or 0.0)} at p90, the limit is {limit}"
    if found.k == request.max_k:
        why += "; it is the largest k that was allowed"
    elif not found.out_of_time:
        why += "; larger ones are expected to miss"
    if not found.confirmed:
        why += ". It was not confirmed."
    elif (chosen.p90_seconds or 0.0) <= request.limit_seconds:
        why += ". Measured again, it still fits."
    else:
        why += ". Measured again, it used some of the headroom and kept the deadline."
    return why + (cut if found.out_of_time else "")


def _shown(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
