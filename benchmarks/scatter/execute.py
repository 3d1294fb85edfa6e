"""Carries out one experiment with the real learners and method."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, initial_items
from aggregator.simulate.engine import Simulation
from aggregator.simulate.scatter_fleet import mixed_columns, scatter_fleet
from benchmarks.channels import WIRE_CODECS, ScatterChannel, require_sound
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut
from benchmarks.scatter.experiment import Experiment, Outcome, Point
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import Learner
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import RoundManifest, seal_chunks
from device_sdk.wire.publish.task_messages import TaskTerms, write_broadcast
from device_sdk.wire.seal.broadcast import Publication, new_group_key

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
        devices = len(self.learners)
        for epoch in range(1, experiment.epochs + 1):
            for _ in self.simulation.epoch(min(experiment.cohort or devices, devices), always):
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
    take a few bytes more or less). 0 for ``direct``, which encodes nothing. Raises KeyError for a
    data set without a known catalogue.
    """
    if experiment.codec == "direct":
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
