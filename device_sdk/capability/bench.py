"""The largest latent dimension whose work fits a deadline here: a round's solve of least squares,
or an epoch of the real train step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.capability.fit import (
    Fit,
    Request,
    TimedOption,
    Workload,
    choose,
    columns,
    confirmed,
)
from device_sdk.capability.machine import Machine, describe_machine, usable_cores
from device_sdk.capability.report import BenchChoice, BenchResult, BenchRow
from device_sdk.factorisation import ITEMS, USERS, check_factorisation, triple_batch
from device_sdk.fields import Declared, Within
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.system.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from device_sdk.runtime.providers import Providers
    from device_sdk.trainer import Trainer

Rows = NDArray[np.int64]
# Small enough to keep the factors where they are; a step costs the same whatever they hold.
_RATE = 1e-6
# Factors are cut from this many drawn numbers: drawing all of them would take longer than a step.
_DRAWN = 65_536


@dataclass(frozen=True)
class WorkSizes(Declared):
    """What a device trains with: its users, their interactions together, and the catalogue.

    ``batch``: triples of a train step; None for all in one, and without meaning to a solve.
    """

    items: Annotated[int, Within(1)]
    interactions: Annotated[int, Within(1)]
    users: Annotated[int, Within(1)] = 1
    batch: Annotated[int, Within(1)] | None = None


class SolveWorkload:
    """A round of least squares: every user's vector in closed form, and the update of all.

    Users have as many interactions each, each with another item, drawn uniformly: the hardest case
    for the memory caches. k of `width` columns are solved for at once, of a float16 matrix as a
    broadcast brings it.
    """

    def __init__(self, sizes: WorkSizes, *, width: int, rng: np.random.Generator) -> None:
        items, interactions, users = sizes.items, sizes.interactions, sizes.users
        matrix = np.resize(rng.standard_normal(_DRAWN, dtype=np.float32), (items, width))
        # Any numbers above 0 will do: a solve costs the same whatever they are.
        strengths = np.geomspace(1, 0.01, width).astype(np.float32)
        self._problem = LeastSquares(matrix.astype(np.float16), strengths, 0.1, 0.01)
        shares = np.diff(np.linspace(0, interactions, users + 1).round().astype(np.int64))
        self._rows = [rng.choice(items, size=int(share), replace=False) for share in shares]
        self._likes: list[Likes] = []
        self._k = 1

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Train `k` columns, and a `share` of the users' items."""
        self._k = k
        self._likes = [Likes.of(np.sort(rows)) for rows in share_of(self._rows, share)]

    def run(self) -> None:
        """Solve, and make the update."""
        self._problem.trained(self._likes, self._k)


def share_of(rows: Sequence[Rows], share: float) -> tuple[Rows, ...]:
    """The first users of these, and of their items as many as make it such a share of the work.

    ``rows``: by user. A user costs something, however few its items are; so does an item.
    """
    users = max(1, math.ceil(share * len(rows)))
    part = share * len(rows) / users
    return tuple(own[: math.ceil(part * len(own))] for own in rows[:users])


class TrainStepWorkload:
    """One epoch: every interaction gives one triple, in steps of `sizes.batch` triples.

    The sizes are rows of the two factor matrices, and triples. Items are drawn uniformly, the
    hardest case for the memory caches.
    """

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        sizes: WorkSizes,
        *,
        providers: Providers,
        threads: int,
        rng: np.random.Generator,
    ) -> None:
        from device_sdk.trainer import Trainer  # onnxruntime is for those who measure with it

        self._trainer: Trainer = Trainer(artifact, providers=providers, threads=threads)
        check_factorisation(self._trainer.artifact)
        self._sizes = sizes
        self._batch = sizes.batch or sizes.interactions
        self._rng = rng
        self._drawn = rng.standard_normal(_DRAWN, dtype=np.float32) * np.float32(0.1)
        self._batches: list[dict[str, NDArray[np.generic]]] = []
        self._share = 0.0

    @property
    def provider(self) -> str:
        """onnxruntime's execution provider in use."""
        return self._trainer.providers[0]

    @property
    def provider_report(self) -> str:
        """Why it is in use; empty for the CPU where nothing else was tried."""
        return self._trainer.provider_report

    @property
    def threads(self) -> int:
        """Threads in use; fewer than asked for where the artifact needs one."""
        return self._trainer.threads

    def prepare(self, k: int, share: float = 1.0) -> None:
        """Give the trainer factors of width `k`, and the first `share` of an epoch's triples."""
        if share != self._share:
            self._share = share
            self._batches = self._draw_batches(max(1, round(self._sizes.interactions * share)))
        self._trainer.set_parameters(
            {
                USERS: np.resize(self._drawn, (self._sizes.users, k)),
                ITEMS: np.resize(self._drawn, (self._sizes.items, k)),
            }
        )

    def run(self) -> None:
        """Train on the epoch's batches."""
        for batch in self._batches:
            self._trainer.step(batch)

    def _draw_batches(self, triples: int) -> list[dict[str, NDArray[np.generic]]]:
        user = np.sort(self._rng.integers(0, self._sizes.users, triples))
        positive = self._rng.integers(0, self._sizes.items, triples)
        negative = self._rng.integers(0, self._sizes.items, triples)
        return [
            triple_batch(
                user[start : start + self._batch],
                positive[start : start + self._batch],
                negative[start : start + self._batch],
                (_RATE, _RATE),
            )
            for start in range(0, triples, self._batch)
        ]


WhenNoneFits = Literal["one", "decline"]
Seen = Callable[[TimedOption], None]


def bench_solved(
    request: Request,
    sizes: WorkSizes,
    most: int,
    *,
    when_none_fits: WhenNoneFits = "one",
    progress: Seen = lambda seen: None,
) -> BenchResult:
    """The largest latent dimension, up to ``most``, with which a round of least squares fits the
    deadline here.

    Times what a device does in such a round, in NumPy, with `sizes.users` who have
    `sizes.interactions` together with a catalogue of `sizes.items`, drawn with a fixed seed.
    Raises ValueError for more interactions than users and items can have.
    """
    if math.ceil(sizes.interactions / sizes.users) > sizes.items:
        raise ValueError(
            f"{sizes.interactions} interactions of {sizes.users} user(s) with {sizes.items} items; "
            "expected at most one of each user with each item"
        )
    clock = MonotonicClock()
    start = clock.now()
    workload = SolveWorkload(sizes, width=most, rng=np.random.default_rng(0))
    found = _searched(workload, request, most, clock, progress)
    machine = describe_machine(threads=_blas_threads(), provider="NumPy")
    elapsed = clock.now() - start
    work = "a round of least squares"
    return _result(found, machine, request, sizes, work, when_none_fits, elapsed)


def _blas_threads() -> int:
    """What NumPy's BLAS takes; a machine whose variables say nothing sensible gives all it has."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        said = os.environ.get(name, "")
        if said.isdigit() and int(said):
            return int(said)
    return max(1, int(usable_cores()))


def bench_stepped(
    artifact: str | os.PathLike[str],
    request: Request,
    sizes: WorkSizes,
    most: int,
    *,
    when_none_fits: WhenNoneFits = "one",
    threads: int = 1,
    providers: Providers = "auto",
    progress: Seen = lambda seen: None,
) -> BenchResult:
    """The largest latent dimension, up to ``most``, with which an epoch fits the deadline here.

    Times the artifact's own train step on `sizes.items` x k and `sizes.users` x k factors and
    `sizes.interactions` triples, drawn with a fixed seed. Of the CPU and an accelerator that "auto"
    finds, each has half of the time box, and the one with the larger k is chosen, or with the
    faster one.

    Raises ArtifactError for an artifact that is no matrix factorisation, ProviderError where the
    providers cannot be used.
    """
    clock, rng = MonotonicClock(), np.random.default_rng(0)
    start = clock.now()
    contenders = _contenders(providers)
    share = replace(request, time_box_seconds=request.time_box_seconds / len(contenders))
    found = []
    for contender in contenders:
        workload = TrainStepWorkload(artifact, sizes, providers=contender, threads=threads, rng=rng)
        each = _searched(workload, share, most, clock, progress)
        machine = describe_machine(threads=workload.threads, provider=workload.provider)
        reason = f"{each.fit.reason} {workload.provider_report}".rstrip()
        found.append((replace(each, fit=replace(each.fit, reason=reason)), machine))
    best, machine = _best(found)
    elapsed = clock.now() - start
    return _result(best, machine, request, sizes, "an epoch of BPR", when_none_fits, elapsed)


@dataclass(frozen=True)
class _Found:
    """``kept``: run again, the chosen k kept the deadline."""

    fit: Fit
    kept: bool = False


def _searched(
    workload: Workload, request: Request, most: int, clock: Clock, progress: Seen
) -> _Found:
    options = columns(workload, most, clock)
    fit = choose(options, request, clock, progress)
    if fit.place is None:
        return _Found(fit)
    kept, told = confirmed(options[fit.place], request, clock)
    return _Found(replace(fit, reason=f"{fit.reason}{told}"), kept)


def _result(
    found: _Found,
    machine: Machine,
    request: Request,
    sizes: WorkSizes,
    work: str,
    when_none_fits: WhenNoneFits,
    elapsed_seconds: float,
) -> BenchResult:
    fit, work = found.fit, f"{work} with {sizes.interactions:,} interactions"
    place = 0 if fit.place is None and when_none_fits == "one" else fit.place
    return BenchResult(
        kind="k",
        work=work,
        machine=machine,
        rows=tuple(_row(each, sizes) for each in sorted(fit.measured, key=lambda one: one.place)),
        slowdown=request.slowdown,
        elapsed_seconds=elapsed_seconds,
        choice=BenchChoice(
            round=work,
            deadline_seconds=request.deadline_seconds,
            limit_seconds=request.limit_seconds,
            fits=fit.place is not None,
            confirmed=found.kept,
            reason=fit.reason,
            option=None if place is None else str(1 + place),
            round_seconds=fit.p90_seconds,
        ),
    )


def _row(seen: TimedOption, sizes: WorkSizes) -> BenchRow:
    p50, p90 = (
        each if math.isfinite(each) else None for each in (seen.p50_seconds, seen.p90_seconds)
    )
    return BenchRow(
        option=str(1 + seen.place),
        runs=len(seen.seconds),
        p50_seconds=p50,
        p90_seconds=p90,
        samples_a_second=sizes.interactions / p50 if p50 else None,
    )


def _contenders(providers: Providers) -> list[Providers]:
    """What is measured: for "auto" the accelerator it finds first, and the CPU."""
    from device_sdk.runtime.providers import candidates

    if providers != "auto":
        return [providers]
    found = candidates("auto")
    return [*found[:-1][:1], found[-1]]


def _best(found: list[tuple[_Found, Machine]]) -> tuple[_Found, Machine]:
    """The one with the largest k, of equal ones the fastest; its reason tells of the others."""

    def worth(one: tuple[_Found, Machine]) -> tuple[int, float]:
        fit = one[0].fit
        return -1 if fit.place is None else fit.place, -(fit.p90_seconds or math.inf)

    best, machine = max(found, key=worth)
    others = [
        f"With {other.provider} instead: {each.fit.reason}"
        for each, other in found
        if each is not best
    ]
    reason = " ".join([best.fit.reason, *others])
    return replace(best, fit=replace(best.fit, reason=reason)), machine
