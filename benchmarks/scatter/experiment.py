"""A run of scatter aggregation as data; how it is carried out, and the rows."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.scatter_loss import LeastSquaresSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.channels import (
    WIRE_CODECS,
    BroadcastCodec,
    ScatterChannel,
    UpdateCodec,
    require_sound,
)
from benchmarks.harness import Row
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, SplitKind
from benchmarks.simulation import Simulation, mixed_columns, scatter_fleet
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import Learner
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.arrays.sparse import MAX_WIDTH
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import RoundManifest, seal_chunks
from device_sdk.wire.publish.task_messages import TaskTerms, write_broadcast
from device_sdk.wire.seal.broadcast import Publication, new_group_key

_PLAIN_BROADCASTS = "float16"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run of scatter aggregation over one virtual device a user.

    Attributes:
        data: ``ml-100k`` or ``ml-1m``.
        split: ``test``, trained on all training items; or ``validation``, which holds one of them
            out and is the only one that settings may be chosen on.
        seed: of the whole run. Runs that share it share fleet classes, cohorts and first matrices
            as far as their shapes allow, which is what makes differences paired.
        width: K.
        classes: k_i of the capacity classes, in equal shares.
        epochs: full passes over the fleet.
        cohort: devices a round; 0 for all.
        spread: standard deviation of the first item matrix.
        codec: how updates travel; ``direct`` hands arrays over, broadcasts' too.
        broadcast_codec: how broadcasts travel. Other than float16, devices are also evaluated with
            what they received.
        every: epochs between evaluations. What a run of test items shows on its way says how soon
            it is there, and chooses nothing.
        fleet: ``all`` devices take part; of ``strong`` those of the largest class, and all are
            evaluated; ``alone`` is each device as a fleet of its own.
    """

    data: str
    split: Literal["test", "validation"]
    seed: int
    width: int
    classes: tuple[int, ...]
    epochs: int
    cohort: int = 256
    spread: float = 0.01
    codec: UpdateCodec = "direct"
    every: int = 10
    settings: ScatterSettings = field(default_factory=ScatterSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    broadcast_codec: BroadcastCodec = "float16"
    fleet: Literal["all", "strong", "alone"] = "all"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.width < 1 or not self.classes or self.every < 1:
            raise ValueError("an experiment needs epochs, columns and at least one capacity class")
        if self.codec == "direct" and self.broadcast_codec != _PLAIN_BROADCASTS:
            raise ValueError(
                f"broadcast_codec is {self.broadcast_codec!r} and codec 'direct', which encodes "
                "nothing; expected a codec for updates such as 'int8'"
            )


@dataclass(frozen=True, slots=True)
class Point:
    """Quality after so many rounds: among all items, and of 99 negatives."""

    rounds: int
    full_hit_ratio: float
    full_ndcg: float
    hit_ratio: float
    ndcg: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality over the run and what it cost.

    ``share`` is that of the devices in a round; ``by_class`` NDCG@10 among all items by k_i at the
    end; ``update_bytes`` the mean sealed size of an update (0 where the updates were handed over
    unencoded); ``device_seconds`` the processor time of a device's round; ``round_seconds`` the
    wall-clock time of a round of all, which is simulated.
    """

    curve: tuple[Point, ...]
    share: float
    by_class: dict[str, float]
    update_rows: float
    update_bytes: float
    device_seconds: float
    round_seconds: float

    @property
    def last(self) -> Point:
        """Quality at the end."""
        return self.curve[-1]

    @property
    def enough(self) -> Point:
        """The first with 95 % of the quality at the end, by NDCG@10 among all items."""
        return next(at for at in self.curve if at.full_ndcg >= 0.95 * self.last.full_ndcg)


CLASSES = (8, 16, 32, 64)
BASELINE = "least squares"
"""The row that the others are compared with, seed by seed."""

_WIDTH = 128
"""A task's default."""
_TUNED_WIDTH = 64
"""Of BPR's settings by hand."""
DEVICES = {"ml-100k": 943, "ml-1m": 6040}
"""Users of each data set, a device each."""
_PASSES = 10
"""Of least squares: rounds, where all devices come in each."""


def least_squares(data: str, split: SplitKind, seed: int, **other: Any) -> Experiment:
    """Nothing is set but what a row is about."""
    base = Experiment(data, split, seed, _WIDTH, (MAX_WIDTH,), _PASSES, 0, codec="int8", every=1)
    return replace(base, **other)


def _fifth(data: str, split: SplitKind, seed: int, **other: Any) -> Experiment:
    return least_squares(data, split, seed, cohort=math.ceil(DEVICES[data] / 5), **other)


def _wide(width: int) -> Callable[[str, SplitKind, int], Experiment]:
    fixed = ScatterSettings(least_squares=LeastSquaresSettings(most_columns=0))
    return partial(least_squares, width=width, settings=fixed)


# BPR's settings were chosen on validation items.


def preset(data: str, split: SplitKind, seed: int) -> Experiment:
    """BPR on ``data`` with every device at K; raises ValueError for other names.

    Compared without limits of norms: what those of a task's default cost, ``benchmarks.robust``
    says.
    """
    if data not in DEVICES:
        raise ValueError(f"no preset for data set {data!r}; expected 'ml-100k' or 'ml-1m'")
    small = data == "ml-100k"
    epochs, cohort, decay = (40, 128, 0.98) if small else (33, 256, 0.976)
    rounds = -(-DEVICES[data] // cohort)
    settings = ScatterSettings(
        loss="bpr",
        # The decay of an epoch, so that it means the same for every size of a cohort.
        optimizer=OptimizerSettings(learning_rate=0.0217, decay=decay ** (1 / rounds)),
        training=BprTraining(
            user_learning_rate=0.7 if small else 2.0, user_l2=0.01 if small else 0.02
        ),
        clip_multiple=0.0,
        row_multiple=0.0,
    )
    return Experiment(
        *(data, split, seed, _TUNED_WIDTH, (_TUNED_WIDTH,), epochs, cohort),
        settings=settings,
        pool=PoolSettings(pseudo_per_positive=0.5),
    )


def unequal(base: Experiment) -> Experiment:
    """An equal fleet's experiment of BPR with devices of four classes.

    Weak devices move a part of their vectors a round, so such a fleet is at its best later. And a
    column is drawn by 47 % of the devices, so that its mean is noisier: a rate lower by the root of
    that share gains a point of NDCG.
    """
    coverage = sum(CLASSES) / len(CLASSES) / base.width
    optimizer = base.settings.optimizer
    optimizer = replace(optimizer, learning_rate=optimizer.learning_rate * math.sqrt(coverage))
    longer = 2.5 if base.data == "ml-100k" else 2.0
    settings = replace(base.settings, optimizer=optimizer)
    return replace(base, classes=CLASSES, epochs=round(base.epochs * longer), settings=settings)


def _patent(base: Experiment) -> Experiment:
    mixed = unequal(base)
    training = replace(mixed.settings.training, scores="columns")
    return replace(mixed, settings=replace(mixed.settings, aggregator="mean", training=training))


def _tuned(
    change: Callable[[Experiment], Experiment], data: str, split: SplitKind, seed: int
) -> Experiment:
    return replace(change(preset(data, split, seed)), codec="int8", every=2)


ROWS = (
    Row(BASELINE, "untouched defaults, every device trains all columns", least_squares),
    Row(
        "unequal",
        "k_i in 8, 16, 32, 64, a quarter each",
        partial(least_squares, classes=CLASSES),
    ),
    Row("a fifth a round", "a fifth of the devices in each of 50 rounds", _fifth),
    Row(
        "unequal, a fifth a round",
        "the unequal fleet, likewise",
        partial(_fifth, classes=CLASSES),
    ),
    Row("all smallest", "k_i = 8 for all", partial(least_squares, classes=CLASSES[:1])),
    Row(
        "only the strong",
        "the quarter with k_i = 64 takes part, and all are evaluated",
        partial(least_squares, classes=CLASSES, fleet="strong"),
    ),
    Row(
        "alone",
        "nothing exchanged: each device its own k_i",
        partial(least_squares, classes=CLASSES, fleet="alone"),
    ),
    *(
        Row(f"K = {width}", f"{width} columns from the first round to the last", _wide(width))
        for width in (8, 32, 64, 256)
    ),
    Row(
        "BPR, defaults",
        "the patent's loss, as untouched and for as many rounds",
        partial(least_squares, settings=ScatterSettings(loss="bpr")),
    ),
    Row("BPR, tuned", "with rates, decay and passes by hand", partial(_tuned, lambda one: one)),
    Row("BPR, tuned, unequal", "the unequal fleet, likewise", partial(_tuned, unequal)),
    Row(
        "BPR, tuned, patent",
        "the unequal fleet, column scores and mean aggregation",
        partial(_tuned, _patent),
    ),
)


MethodT = TypeVar("MethodT", bound=ScatterMethod)

_TIMED = 100
"""Devices whose rounds are timed, at equal distances."""


@dataclass(frozen=True, slots=True, eq=False)
class VirtualFleet(Generic[MethodT]):
    """Both halves of a run. ``learners`` are the devices' own, whatever they send by way of."""

    learners: list[ScatterLearner]
    columns: NDArray[np.int64]
    method: MethodT
    channel: ScatterChannel
    simulation: Simulation

    def epochs(self, experiment: Experiment, always: Sequence[int] = ()) -> Iterator[int]:
        """Train; each number is that of an epoch that is done. ``always``: devices in every round.

        Raises RuntimeError where a device failed or an update was refused.
        """
        devices = np.arange(len(self.learners))
        if experiment.fleet == "strong":
            devices = devices[self.columns == max(experiment.classes)]
        cohort = min(experiment.cohort or len(devices), len(devices))
        for epoch in range(1, experiment.epochs + 1):
            for _ in self.simulation.epoch(cohort, always, devices):
                pass
            require_sound(self.simulation)
            yield epoch


def virtual_fleet(
    experiment: Experiment,
    devices: Sequence[Sequence[NDArray[np.int64]]],
    items: int,
    step: FactorStep,
    method: Callable[[NDArray[np.float32], np.random.Generator], MethodT],
    senders: Callable[[list[ScatterLearner]], Sequence[Learner]] = lambda learners: learners,
) -> VirtualFleet[MethodT]:
    """The experiment's fleet before its first round.

    Args:
        devices: for each, of each of its users, the item rows to train on.
        items: in the catalogue.
        step: computes BPR's gradients for every virtual device.
        method: of the first matrix, and of the generator that rounds what travels.
        senders: what devices' updates come from: their learners, or what stands before some.
    """
    # One stream a purpose: changing one part of an experiment leaves the others' draws alone.
    dealing, start, cohorts, fleet, coding = np.random.SeedSequence(experiment.seed).spawn(5)
    columns = mixed_columns(len(devices), experiment.classes, np.random.default_rng(dealing))
    learners = scatter_fleet(devices, columns, step, fleet, experiment.pool)
    first = initial_items(items, experiment.width, experiment.spread, np.random.default_rng(start))
    rng = np.random.default_rng(coding)
    channel = ScatterChannel(experiment.codec, rng, experiment.broadcast_codec)
    half = method(first, rng)
    simulation = Simulation(half, senders(learners), np.random.default_rng(cohorts), channel)
    return VirtualFleet(learners, columns, half, channel, simulation)


def execute(
    experiment: Experiment, split: LeaveOneOut, step: FactorStep, progress: Callable[[str], None]
) -> Outcome:
    """Train for ``experiment.epochs`` and evaluate on ``split``, of the data and kind that the
    experiment names; ``progress`` is called with one line of text after each epoch."""
    if experiment.fleet == "alone":
        return _alone(experiment, split, step, progress)
    devices = [[rows] for rows in split.train]
    fleet = virtual_fleet(
        experiment,
        devices,
        split.items,
        step,
        lambda first, _: ScatterMethod(first, experiment.settings),
    )
    curve: list[Point] = []
    began, evaluating = time.perf_counter(), 0.0
    for epoch in fleet.epochs(experiment):
        spent = time.perf_counter() - began - evaluating
        if epoch == experiment.epochs or epoch % experiment.every == 0:
            shown = fleet.channel.down(_next_broadcast(fleet.method, fleet.simulation.rounds))
            users, items = vectors(fleet.learners, shown)
            curve.append(_evaluate(fleet.simulation.rounds, users, items, split))
        note = f"NDCG@10 {curve[-1].full_ndcg:.4f}" if curve else ""
        progress(f"epoch {epoch}/{experiment.epochs}, {spent / epoch:.1f} s each {note}")
        evaluating = time.perf_counter() - began - spent
    return Outcome(
        curve=tuple(curve),
        share=min(1.0, (experiment.cohort or split.users) / split.users),
        by_class=_by_class(users, items, split, fleet.columns),
        update_rows=fleet.channel.mean_rows,
        update_bytes=fleet.channel.mean_bytes,
        device_seconds=_device_seconds(fleet.learners, shown),
        round_seconds=spent / fleet.simulation.rounds,
    )


def _alone(
    experiment: Experiment, split: LeaveOneOut, step: FactorStep, progress: Callable[[str], None]
) -> Outcome:
    """A fleet of one for each device; the mean over them."""
    (dealing,) = np.random.SeedSequence(experiment.seed).spawn(1)
    columns = mixed_columns(split.users, experiment.classes, np.random.default_rng(dealing))
    found = []
    for user, count in enumerate(columns.tolist()):
        own = replace(experiment, fleet="all", classes=(count,), every=experiment.epochs)
        found.append(execute(own, split.of(user), step, lambda _: None))
        progress(f"device {user + 1} of {split.users}")

    ends = np.array([astuple(one.last) for one in found])
    by_class = {str(k): float(ends[columns == k, 2].mean()) for k in experiment.classes}
    seconds = [(one.device_seconds, one.round_seconds) for one in found]
    last = Point(experiment.epochs, *ends[:, 1:].mean(axis=0).tolist())
    return Outcome((last,), 1.0, by_class, 0.0, 0.0, *np.mean(seconds, axis=0).tolist())


def _next_broadcast(method: ScatterMethod, rounds: int) -> Broadcast:
    """What the round after so many would begin with; the method stays as it is."""
    return copy.deepcopy(method).open_round(rounds + 1)


def vectors(
    learners: Sequence[ScatterLearner], shown: Broadcast
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of all users, [users, K], and of all items, [items, K], to recommend with."""
    users = np.concatenate([learner.vectors(shown) for learner in learners])
    return users, shown.tensors["items"].astype(np.float32)


def _evaluate(
    rounds: int, users: NDArray[np.float32], items: NDArray[np.float32], split: LeaveOneOut
) -> Point:
    sampled = quality(sampled_ranks(users, items, split))
    full = quality(full_ranks(users, items, split))
    return Point(rounds, full.hit_ratio, full.ndcg, sampled.hit_ratio, sampled.ndcg)


def _by_class(
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    split: LeaveOneOut,
    columns: NDArray[np.int64],
) -> dict[str, float]:
    ranks = full_ranks(users, items, split)
    return {
        str(count): quality(ranks[columns == count]).ndcg for count in np.unique(columns).tolist()
    }


def _device_seconds(learners: Sequence[ScatterLearner], shown: Broadcast) -> float:
    """Of a device that trains alone; the mean. Their states are others afterwards."""
    timed = learners[:: math.ceil(len(learners) / _TIMED)]
    began = time.process_time()
    for learner in timed:
        learner.train(shown)
    return (time.process_time() - began) / len(timed)


@cache
def open_step(artifact: Path | None) -> FactorStep:
    """The train graph on one CPU thread: of ``artifact``, or of the one that is installed."""
    folder = artifact if artifact is not None else packaged_artifact()
    return TrainerStep(Trainer(folder, providers="cpu", threads=1))


_ITEMS = {"ml-100k": 1682, "ml-1m": 3706}
_TASK, _COHORT = "movies", "all"
_TRAIN_SECONDS = 60.0
_ID = bytes(32)


def published_bytes(experiment: Experiment) -> int:
    """Bytes of the MQTT payloads of the first round's broadcast: its chunks and its manifest.

    No run is needed: the size follows from the matrix's shape and codec (later rounds' rates may
    take a few bytes more or less). 0 for ``direct``, which encodes nothing, and for devices alone.
    Raises KeyError for a data set without a known catalogue.
    """
    if experiment.codec == "direct" or experiment.fleet == "alone":
        return 0
    rng = np.random.default_rng(0)
    first = initial_items(_ITEMS[experiment.data], experiment.width, experiment.spread, rng)
    broadcast = ScatterMethod(first, experiment.settings).open_round(1)
    terms = TaskTerms("scatter", WIRE_CODECS[experiment.codec], _TRAIN_SECONDS)
    plaintext = write_broadcast(broadcast, terms, experiment.broadcast_codec, rng)
    publication = Publication(new_group_key(1, rng.bytes), _TASK, _COHORT, rng.bytes)
    chunks, digests = seal_chunks(publication, plaintext)
    manifest = RoundManifest(
        root_fingerprint=bytes(16),
        task=_TASK,
        cohort=_COHORT,
        generation=1_700_000_000,
        round=1,
        version=0,
        artifact_id=_ID,
        catalogue_id=_ID,
        broadcast_id=publication.broadcast_id,
        key_epoch=1,
        sampling_seed=_ID,
        threshold=2**63,
        deadline_unix_seconds=1_700_000_300,
        opened_unix_seconds=1_700_000_000,
        codec=experiment.broadcast_codec,
        length=len(plaintext),
        chunks=digests,
    )
    signing = Ed25519PrivateKey.from_private_bytes(rng.bytes(32))
    sealed = publication.seal_manifest(encode(manifest), signing)
    return sum(map(len, chunks)) + len(sealed)
