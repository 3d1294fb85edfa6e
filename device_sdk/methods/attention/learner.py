"""The device's half of attention-based aggregation: it learns whom to learn from.

Method: FedAMN (papers/fedamn), algorithm 2; what its text leaves open is written out in
docs/methods/attention.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLayout, layout_of
from device_sdk.local_data import DataSource, LocalData
from device_sdk.methods.attention.contract import MIXTURE, VECTOR, AttentionTraining
from device_sdk.methods.attention.fleet import FleetView, mixing_ahead, read_fleet, stand_ins
from device_sdk.methods.attention.mixer import (
    SCORES,
    AttentionScores,
    Mixer,
    favoured,
    scores_of,
)
from device_sdk.methods.learner import (
    Declined,
    Learner,
    LearnerError,
    LearnerParts,
    MovableWork,
    State,
    Where,
)
from device_sdk.methods.local_steps import (
    ProximalTerm,
    SampleStream,
    forget_momenta,
    least_rows,
    restore_trainer,
    sayable,
    too_few_samples,
    trainer_state,
    unchanged_on_error,
)
from device_sdk.methods.state import Entry, part, prefixed, unpack
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Scalar, Update
from device_sdk.wire.publish.report import Reason

Floats = NDArray[np.float32]


Samples = dict[str, NDArray[Any]]


class RoundSteps:
    """Trains the base network in ``trainer`` for one round, its optimizer as at its first step.

    Args:
        data: at least one sample for each fold.
        rng: orders the samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        training: AttentionTraining,
        round_id: int,
        data: LocalData,
        rng: np.random.Generator,
    ) -> None:
        self._trainer = trainer
        self._layout = layout_of(trainer.artifact)
        self._training = training
        self._held_fold = round_id % training.folds
        self._data = data
        self._rng = rng

    def base_steps(self, start: Floats, resume: Floats | None = None) -> float:
        """Base steps on all samples; their mean loss.

        ``start``, float32 [p], is where the proximal term pulls to, and where the steps begin
        unless there is another place to ``resume`` from.
        """
        pull = self._begin(start)
        if resume is not None:
            self._trainer.set_parameters(self._layout.unflatten(resume))
        stream = self._stream(np.arange(self._data.samples), self._training.batch_size)
        return self._steps(stream, self._training.base_steps, pull) / self._training.base_steps

    def alternate(self, mixer: Mixer) -> float:
        """Meta-steps on one fold, base steps on the others, by turns; the mean base loss."""
        training = self._training
        base, held = _folds(self._data.samples, training.folds, self._held_fold)
        meta = self._stream(held, training.meta_batch_size)
        stream = self._stream(base, training.batch_size)
        drift = np.zeros(self._layout.size, dtype=np.float32)
        pull: ProximalTerm | None = None
        total, left = 0.0, training.base_steps
        while left:
            mixer.step(meta.draw(), drift)
            mixed = mixer.mix()
            if pull is None:
                pull = self._begin(mixed)
            else:
                self._trainer.set_parameters(self._layout.unflatten(mixed + drift))
            steps = min(left, training.meta_every)
            if steps == left:
                # No meta-step comes after these, so the held fold may be trained on as well.
                stream = self._stream(np.arange(self._data.samples), training.batch_size)
            total += self._steps(stream, steps, pull)
            drift = self._layout.flatten(self._trainer.parameters) - mixed
            left -= steps
        return total / training.base_steps

    def _begin(self, start: Floats) -> ProximalTerm:
        """Puts the base network at ``start``, with its optimizer as new."""
        forget_momenta(self._trainer)
        self._trainer.set_parameters(self._layout.unflatten(start))
        return ProximalTerm(self._trainer, self._training.proximal, self._training.learning_rate)

    def _steps(self, stream: _Rows, count: int, pull: ProximalTerm) -> float:
        """The sum of their losses."""
        total = 0.0
        for _ in range(count):
            batch = stream.draw()
            total += self._trainer.step(batch, hyper=pull.hyper)
            if pull.after is not None:
                pull.after(batch)
        return total

    def _stream(self, rows: NDArray[np.int64], batch_size: int) -> _Rows:
        return _Rows(self._data, rows, batch_size, self._rng)


class _Rows:
    """A stream of batches from some rows of the local samples, which are not copied for it."""

    def __init__(
        self, data: LocalData, rows: NDArray[np.int64], batch_size: int, rng: np.random.Generator
    ) -> None:
        self._train = data.train
        self._stream = SampleStream({"rows": rows}, batch_size, rng)

    def draw(self) -> Samples:
        """The next batch; see :class:`~device_sdk.methods.local_steps.SampleStream`."""
        rows = self._stream.draw()["rows"]
        return {name: array[rows] for name, array in self._train.items()}


def _folds(samples: int, folds: int, held: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of all samples but the held fold's, and that fold's: contiguous, as windows overlap."""
    bounds = np.linspace(0, samples, folds + 1).astype(np.int64)
    inside = np.arange(bounds[held], bounds[held + 1])
    return np.delete(np.arange(samples), inside), inside


_META = "meta."


class AttentionLearner(Learner):
    """Trains a base network from a mixture of its neighbours' parameters.

    Args:
        data: the device's samples, asked for at the start of each round; ``train`` is used.
        trainer: of the base network's artifact. Each round sets its parameters and forgets its
            momenta; between rounds it holds this device's own model.
        meta: of the meta-network's artifact for the same base network; may be None with
            ``placement="aggregator"``.
        sender: this device's name among the task's, 32 hexadecimal digits.
        rng: orders the samples.
        placement: ``device`` fetches the cluster's vectors and learns how to mix them;
            ``aggregator`` has the mixture made by the aggregator, for devices too weak for that.

    Raises ValueError where the two artifacts do not belong together.
    """

    has_movable_work = True

    @classmethod
    def make(cls, parts: LearnerParts) -> AttentionLearner:
        """With ``auto``, mix on the device where it has what that takes."""
        placement = parts.placement
        if placement == "auto":
            placement = "aggregator" if parts.companion is None else "device"
        if placement == "device" and parts.companion is None:
            raise Declined(
                "the task offers no meta-network for this artifact; see placement",
                Reason.DOES_NOT_FIT,
            )
        return cls(parts.data, parts.trainer, parts.companion, parts.sender, parts.rng, placement)

    def __init__(
        self,
        data: DataSource,
        trainer: Trainer,
        meta: Trainer | None,
        sender: str,
        rng: np.random.Generator,
        placement: Where = "device",
    ) -> None:
        if placement not in ("device", "aggregator"):
            raise ValueError(f"placement is {placement!r}; expected 'device' or 'aggregator'")
        if placement == "device" and meta is None:
            raise ValueError("placement 'device' needs the meta-network's trainer")
        self._data = data
        self._trainer = trainer
        self._meta = meta
        self._sender = sender
        self._rng = rng
        self._placement = placement
        self._layout = layout_of(trainer.artifact)
        if meta is not None:
            _require_match(meta, self._layout)
        self._vector: Floats | None = None
        self._scores: AttentionScores | None = None

    @property
    def vector(self) -> Floats | None:
        """w_i, float32 [p] in the artifact's flat layout: a copy. None before the first round."""
        return None if self._vector is None else self._vector.copy()

    @property
    def scores(self) -> AttentionScores | None:
        """Whom this device listened to in its last round with attention; None before that."""
        return self._scores

    def show(self, vector: Floats | None = None) -> Trainer:
        """The trainer, set to this device's own model (or to ``vector``), to predict with.

        Raises LearnerError before the first round.
        """
        chosen = self._vector if vector is None else vector
        if chosen is None:
            raise LearnerError("this device has no model of its own before its first round")
        self._trainer.set_parameters(self._layout.unflatten(chosen))
        return self._trainer

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        fleet = read_fleet(broadcast, self._layout)
        if fleet.warming_up or self._vector is None:
            return []
        if self._lets_mix(fleet):
            name = MIXTURE + self._sender
            return [name] if name in broadcast.offered else []
        if fleet.training.layers == "second" or self._meta is None:
            return []
        rows = fleet.offered_neighbours(broadcast, self._sender)
        count = fleet.training.neighbours
        if 0 < count < len(rows):
            query = fleet.query(self._sender, self._vector, rows)
            chosen = favoured(self._meta, query, fleet.sketches[rows], count)
            rows = [rows[place] for place in chosen]
        return [VECTOR + fleet.senders[row] for row in rows]

    def train(self, broadcast: Broadcast) -> Update:
        """One round; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds ``vector`` float32 [p], the base network's parameters after its steps.
        Metadata: ``samples``, ``mixture`` (whether the aggregator is to mix for this device),
        ``loss`` (mean of the base steps) and, where the task has a ladder, ``rung``.

        Raises LearnerError where the broadcast does not fit, there are no samples, or training
        fails; nothing has changed then.
        """
        fleet = read_fleet(broadcast, self._layout)
        data = self._samples(fleet)
        steps = self._round_steps(fleet, data)
        with self._unchanged_on_error():
            mixer = None if fleet.warming_up else self._mixer(fleet, broadcast)
            if mixer is None:
                personal = fleet.training.personal and not fleet.warming_up
                start = self._start(fleet, broadcast)
                loss = steps.base_steps(start, resume=self._vector if personal else None)
                scores = self._scores
            else:
                loss = steps.alternate(mixer)
                scores = mixer.scores(fleet.round_id)
            loss = sayable(loss)
            vector = self._layout.flatten(self._trainer.parameters)
        self._vector, self._scores = vector, scores
        metadata: dict[str, Scalar] = {
            "samples": data.samples,
            "mixture": self._lets_mix(fleet),
            "loss": loss,
        }
        submodel = self._trainer.artifact.submodel
        if submodel is not None and len(fleet.ladder.layouts) > 1:
            metadata["rung"] = submodel.rung
        return Update(broadcast.round_id, {"vector": vector.copy()}, metadata)

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The round's base steps, whose proximal term pulls to where they begin."""
        fleet = read_fleet(broadcast, self._layout)
        steps = self._round_steps(fleet, self._samples(fleet))
        with self._unchanged_on_error():
            steps.base_steps(self._layout.flatten(self._trainer.parameters))

    def movable_work(self, broadcast: Broadcast) -> MovableWork | None:
        """Mixing, which takes the meta-network and the neighbours' vectors.

        Raises LearnerError where the broadcast does not fit.
        """
        ahead = mixing_ahead(read_fleet(broadcast, self._layout), broadcast, self._sender)
        if ahead is None or self._meta is not None:
            return ahead
        return replace(ahead, obstacle="the task offers no meta-network")

    def rehearse(self, broadcast: Broadcast) -> None:
        """The work of a round with a mixture of its own, even in the warm-up, to be timed.

        Mixes stand-ins, so it needs no vectors. Leaves both trainers changed: for a learner that is
        thrown away. Raises LearnerError as ``train`` does, and where there is no mixing ahead.
        """
        fleet = read_fleet(broadcast, self._layout)
        ahead = mixing_ahead(fleet, broadcast, self._sender)
        if ahead is None or self._meta is None:
            raise LearnerError("this device has no mixing ahead of it")
        query = np.zeros(fleet.sketches.shape[1:], dtype=np.float32)
        neighbours = stand_ins(fleet, ahead.size)
        shared = fleet.shared
        mixer = Mixer(
            self._meta,
            fleet.training,
            self._layout,
            neighbours,
            self._sender,
            shared,
            shared,
            query,
        )
        self._round_steps(fleet, self._samples(fleet)).alternate(mixer)

    def receive(self, broadcast: Broadcast) -> bool:
        """Show the global vector, with which a device begins that has none of its own."""
        shared = read_fleet(broadcast, self._layout).shared
        self._trainer.set_parameters(self._layout.unflatten(shared))
        return True

    def state(self) -> State:
        """``vector`` and ``scores.*`` once there are any, and the meta-trainer's, as ``meta.*``."""
        found: dict[str, NDArray[Any]] = {}
        if self._vector is not None:
            found["vector"] = self._vector.copy()
        if self._scores is not None:
            found.update(self._scores.state())
        if self._meta is not None:
            found.update(trainer_state(self._meta, _META))
        return found

    def restore(self, state: State) -> None:
        """Take ``state()`` back; raises LearnerError where names, dtypes or shapes do not fit."""
        meta = prefixed(_META, part(_META, state))
        schema = {"vector": Entry(np.float32, (self._layout.size,), optional=True)}
        rest = {n: a for n, a in state.items() if n not in meta and not n.startswith(SCORES)}
        vector = unpack(schema, rest, error=LearnerError).get("vector")
        try:
            scores = scores_of(state)
        except ValueError as error:
            raise LearnerError(str(error)) from error
        if scores is not None and len(scores.second) != len(self._layout.groups):
            raise LearnerError("the state does not fit this model: its scores")
        if self._meta is not None:
            restore_trainer(self._meta, meta, _META)
        elif meta:
            raise LearnerError("the state's meta-network is not the one of this artifact")
        self._vector = vector
        self._scores = scores
        if self._vector is not None:
            self.show()

    # -- a round -----------------------------------------------------------------------------------

    def _samples(self, fleet: FleetView) -> LocalData:
        data = self._data()
        networks = [self._trainer, *([self._meta] if self._meta is not None else [])]
        sizes = fleet.training.batch_size, fleet.training.meta_batch_size
        if data.samples == 0:
            raise LearnerError("there are no local samples to train on", Reason.NO_DATA)
        # Each fold trains one of the networks by itself.
        needed = fleet.training.folds * max(
            least_rows(each, data.train.keys(), data.samples, size)
            for each, size in zip(networks, sizes, strict=False)
        )
        if data.samples < needed:
            raise too_few_samples(data.samples, needed)
        return data

    def _round_steps(self, fleet: FleetView, data: LocalData) -> RoundSteps:
        return RoundSteps(self._trainer, fleet.training, fleet.round_id, data, self._rng)

    def _lets_mix(self, fleet: FleetView) -> bool:
        return self._placement == "aggregator" or fleet.training.aggregator_mixes

    def _mixer(self, fleet: FleetView, broadcast: Broadcast) -> Mixer | None:
        """None where this round is to start without a mixture of the device's own."""
        if self._lets_mix(fleet) or self._vector is None or self._meta is None:
            return None
        neighbours = fleet.fetched(broadcast, self._sender, self._vector)
        if len(neighbours) == 0 and fleet.training.layers != "second":
            return None
        rows = [fleet.senders.index(name) for name in neighbours.names]
        query = fleet.query(self._sender, self._vector, rows)
        return Mixer(
            self._meta,
            fleet.training,
            self._layout,
            neighbours,
            self._sender,
            self._vector,
            fleet.shared,
            query,
        )

    def _start(self, fleet: FleetView, broadcast: Broadcast) -> Floats:
        if fleet.training.keeps and self._vector is not None:
            return fleet.shared_keeping(self._vector)
        if fleet.warming_up or not self._lets_mix(fleet):
            return fleet.shared
        given = fleet.given_mixture(broadcast, self._sender)
        return fleet.shared if given is None else given

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(unchanged_on_error(self._trainer))
            if self._meta is not None:
                stack.enter_context(unchanged_on_error(self._meta))
            yield


def _require_match(meta: Trainer, layout: FlatLayout) -> None:
    ports = {port.of: port.shape for port in meta.artifact.graphs["train"].select("batch")}
    if "start" not in ports:
        raise ValueError(
            f"{meta.artifact.name!r} is no meta-network: export one with attention_recipe"
        )
    groups = [ports.get(f"neighbours.{group}") for group in range(len(layout.groups))]
    if ports["start"] != (layout.size,) or None in groups:
        raise ValueError(
            f"the meta-network {meta.artifact.name!r} is not one for a base network of "
            f"{layout.size} parameters in the groups {', '.join(layout.groups)}: export both from "
            "the same module"
        )
