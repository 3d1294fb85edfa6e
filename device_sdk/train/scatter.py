"""A round of scatter aggregation on one device: its k, its training, its update's body."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.capability.bench import share_of
from device_sdk.capability.fit import Request, choose, columns
from device_sdk.factorisation import check_factorisation, packaged_artifact
from device_sdk.home.model_store import CapabilityRow
from device_sdk.methods.learner import Declined, LearnerError, State
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.methods.scatter.factor_step import FactorStep, StepByUsers, TrainerStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.least_squares import items_of
from device_sdk.system.clock import slowed
from device_sdk.system.watch import Watch
from device_sdk.train.evaluate import HeldOutItem, RankEvaluation
from device_sdk.train.job import RoundTrainer, TrainedRound, TrainingJob
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.publish.report import ItemCount, Reason
from device_sdk.world import DeviceWorld

Rows = NDArray[np.int64]

_UNTRAINED = "untrained_from"
"""In the stored state, beside the learner's own: int64 [users], by user the least number of an item
that was never trained on since the task evaluates."""
_NEW: State = {
    "users": np.empty((0, 0), dtype=np.float32),
    "pool": np.empty(0, dtype=np.int64),
    "deck": np.empty(0, dtype=np.int64),
}
"""The state of a learner that has not trained yet."""
_NOBODY = np.empty(0, dtype=np.int64)
_OF_THE_WORK = ("loss", "scores", "most_triples")
"""Settings of a broadcast with which the time of a round changes."""


@dataclass(slots=True)
class _Positives:
    """A snapshot: what the app records while a round is trained belongs to the next one."""

    rows: Sequence[Rows] = ()

    def positives(self) -> Sequence[Rows]:
        return self.rows


def factor_step(artifact: Path, providers: str = "auto", watch: Watch | None = None) -> FactorStep:
    """The step of a task's factorisation on this device.

    Only the graph that is installed with the device is known to be NumPy's formula. Another one is
    run as it is: raises ArtifactError where it is no factorisation, RuntimeMissing, ProviderError.
    """

    def graph() -> TrainerStep:
        from device_sdk.trainer import Trainer

        trainer = Trainer(artifact, providers=providers, threads=1, watch=watch)
        check_factorisation(trainer.artifact)
        return TrainerStep(trainer)

    return StepByUsers(graph) if artifact == packaged_artifact() else graph()


class ScatterTrainer(RoundTrainer):
    """Trains with the home's interactions and learner state; see :class:`RoundTrainer`."""

    def __init__(self, world: DeviceWorld) -> None:
        super().__init__(world)
        self._local, self._watch = _Positives(), world.watch
        # Kept from round to round: it prepares its triples only where the data has changed.
        self._learner: ScatterLearner | None = None
        self._loaded: Path | None = None

    def train(self, job: TrainingJob) -> TrainedRound:
        """One round. Raises LearnerError, ArtifactError, ValueError, or :class:`Declined`."""
        items, catalogue = items_of(job.broadcast.tensors), job.catalogue
        if catalogue is not None and len(catalogue) != len(items):
            raise LearnerError(
                f"the catalogue has {len(catalogue)} items, the item matrix {len(items)} rows"
            )
        # Without a catalogue an item's outside id is its row.
        rows = {str(row): row for row in range(len(items))} if catalogue is None else catalogue.rows
        count = self._count(job, rows)
        learner = self._load(job.artifacts[0].folder)
        state = self._state(job, len(items))
        untrained = state.pop(_UNTRAINED, _NOBODY)
        self._local.rows, held, untrained = self._split(job, rows, untrained)
        learner.restore(state)

        options = self._options
        capability = self._capability(job, learner)
        learner.restore(state)
        wanted = options.k if capability is None else int(capability.option)
        learner.columns = min(wanted or 1, items.shape[1])
        found = self.evaluation(job)
        ranks = None if found is None else RankEvaluation(found, held)
        if ranks is not None:
            ranks.stage("global", learner.vectors(job.broadcast), items)
        start = self._clock.now()
        update = learner.train(job.broadcast)
        seconds = slowed(self._clock, start, options.slowdown)
        body = encode_scatter_update(update, items.shape[1], job.terms.update_codec, self._rng)
        if capability is not None:
            capability = capability.after(late=seconds > self.affordable_seconds(job))
        if ranks is not None and learner.personalises(job.broadcast):
            ranks.stage("personal", learner.vectors(job.broadcast), items)
        return TrainedRound(
            learner.columns,
            body,
            {**learner.state(), _UNTRAINED: untrained},
            capability,
            seconds,
            evaluation=None if found is None else found.report,
            evaluation_detail="" if found is None else found.detail,
            items=count,
        )

    def _load(self, artifact: Path) -> ScatterLearner:
        if self._learner is None or self._loaded != artifact:
            step = factor_step(artifact, self._options.providers, self._watch)
            self._learner = ScatterLearner(self._local, step, 1, self._rng, self._options.pool)
            self._loaded = artifact
        return self._learner

    def _count(self, job: TrainingJob, rows: Mapping[str, int]) -> ItemCount:
        """How much of what was recorded the catalogue knows; raises Declined for nothing of it: an
        update of none of it would count, and what came of it were noise."""
        interactions = self._home.interactions
        recorded = interactions.recorded(self._home.record_names(job.manifest.task))
        unknown = [item for item in recorded if item not in rows]
        count = ItemCount(len(recorded), len(unknown))
        if recorded and len(unknown) == len(recorded):
            why = _why_none(unknown, rows, interactions.some_users(100))
            raise Declined(f"{count}: {why}", Reason.UNKNOWN_ITEMS, count)
        return count

    def _split(
        self, job: TrainingJob, rows: Mapping[str, int], untrained: Rows
    ) -> tuple[tuple[Rows, ...], list[HeldOutItem], Rows]:
        """What to train on, and what not (:func:`without_latest`) where the task evaluates."""
        names = self._home.record_names(job.manifest.task)
        positives = self._home.interactions.positives(rows, names)
        if job.terms.evaluation is None:
            return positives, [], untrained
        latest, numbers = self._home.interactions.latest(rows, names)
        return without_latest(positives, latest, numbers, untrained)

    def _state(self, job: TrainingJob, items: int) -> dict[str, NDArray[Any]]:
        state = self._home.models.learner(job.manifest.task, job.terms.method)
        if state is None or job.fresh or not _NEW.keys() <= state.keys():
            return {**_NEW}  # a new one, or the task had another method when it was stored
        # After an aggregator's restore from a backup the catalogue may have lost its newest rows.
        pool = state["pool"]
        return {**state, "pool": pool[pool < items]}

    def _capability(self, job: TrainingJob, learner: ScatterLearner) -> CapabilityRow | None:
        """The measured k, from the store where conditions are as they were; None for a given k."""
        options = self._options
        if options.k is not None:
            return None
        task, width = job.manifest.task, int(job.broadcast.tensors["items"].shape[1])
        interactions = max(1, sum(len(rows) for rows in self._local.rows))
        # Only what the work depends on: rates decay from round to round.
        settings = job.broadcast.settings
        work = " ".join(str(settings[name]) for name in _OF_THE_WORK if name in settings)
        conditions = f"{job.manifest.artifact_id.hex()} K={width} {self.conditions(job)} {work}"
        known = self._home.models.capability(task)
        if known is not None and known.holds(conditions, interactions):
            return known
        workload = _RoundWorkload(learner, job.broadcast, self._local)
        request = Request(
            deadline_seconds=self.affordable_seconds(job),
            time_box_seconds=options.capability_seconds,
            slowdown=options.slowdown,
        )
        fit = choose(columns(workload, width, self._clock), request, self._clock)
        workload.end()
        if fit.place is None and options.when_none_fits == "decline":
            raise Declined(fit.reason, Reason.TOO_SLOW)
        return CapabilityRow(
            task=task, conditions=conditions, option=str(1 + (fit.place or 0)), size=interactions,
            placement=None, placed_size=None, misses=0, reason=fit.reason,
            p90_seconds=fit.p90_seconds,
        )  # fmt: skip


def _why_none(unknown: Sequence[str], rows: Mapping[str, int], users: Sequence[str]) -> str:
    """What may be the matter where a catalogue knows no item that was recorded."""
    told = f"recorded are such as {unknown[0]!r}, the catalogue has such as {next(iter(rows))!r}"
    if any(user in rows for user in users):
        return f"{told}; it knows users' names, so users and items may be swapped"
    plain = {_plain(item): item for item in rows}
    alike = next((each for each in unknown if _plain(each) in plain), None)
    if alike is not None:
        return f"{told}; {alike!r} and {plain[_plain(alike)]!r} differ in spelling alone"
    return told


def _plain(item: str) -> str:
    """Without capitals, accents' spelling and surrounding space."""
    return unicodedata.normalize("NFKC", item).casefold().strip()


def without_latest(
    positives: Sequence[Rows], latest: Rows, numbers: Rows, untrained: Rows
) -> tuple[tuple[Rows, ...], list[HeldOutItem], Rows]:
    """What to train on, and what not: each user's latest item, where a task evaluates; and from
    which number on users' items are not trained on after that.

    A user's only item is trained on, and so is a latest one that was trained on before: until a
    newer one is recorded nothing of this user's is held out. What is, is held out in every round of
    such a task, whether this device evaluates in it or not. As a negative it is drawn like any item
    that a user has not touched: were it spared, training would lift it above the others.

    Args:
        positives: per user the rows of its items.
        latest, numbers: per user the row of the latest one, and its number.
        untrained: per user the number from which on items were not trained on before; of users who
            came later nothing was.
    """
    since = np.zeros(max(len(positives), len(untrained)), dtype=np.int64)
    since[: len(untrained)] = untrained
    kept, held = [], []
    for user, own in enumerate(positives):
        if len(own) < 2 or numbers[user] < since[user]:
            kept.append(own)
            since[user] = max(since[user], numbers[user] + 1)
            continue
        kept.append(own[own != latest[user]])
        held.append(HeldOutItem(user, int(latest[user]), kept[-1]))
        since[user] = numbers[user]
    return tuple(kept), held, since


class _RoundWorkload:
    """The very work of a round, whatever its loss. Leaves the learner in another state."""

    def __init__(self, learner: ScatterLearner, broadcast: Broadcast, local: _Positives) -> None:
        self._learner, self._broadcast, self._local = learner, broadcast, local
        self._state = learner.state()
        self._rows = tuple(local.rows)

    def prepare(self, k: int, share: float = 1.0) -> None:
        self._learner.restore(self._state)
        self._learner.columns = k
        self._local.rows = share_of(self._rows, share)

    def run(self) -> object:
        """Train one round."""
        return self._learner.train(self._broadcast)

    def end(self) -> None:
        """Give the device's data back to the learner."""
        self._local.rows = self._rows
