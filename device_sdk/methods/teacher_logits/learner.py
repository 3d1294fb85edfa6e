"""The device's half of teacher-logit aggregation: learn from labels, and from what others predict.

Methods: AFD (papers/afd: equations 1 to 6, table 2) and plain federated distillation (Jeong et al.
2018), which is AFD without divergence and weight penalty. Devices may have models of any kind: only
mean soft outputs by label are exchanged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.local_data import DataSource
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import (
    LABEL,
    TRAINER,
    ModelLearner,
    StepsReport,
    epoch_batches,
    labelled_samples,
    least_rows,
    restore_trainer,
    trainer_state,
    unchanged_on_error,
)
from device_sdk.methods.state import Entry, State, part, prefixed, unpack
from device_sdk.methods.teacher_logits.contract import (
    LabelKnowledge,
    Share,
    TeacherLogitsTraining,
    decode_knowledge,
    encode_knowledge,
    share_of,
)
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update

# What a device sent in its last rounds, so that it can take itself out of the sums.

# Verdicts that never come do not make the state grow for ever.
_MOST_SHARES = 8


_SENT = {
    "sent_rounds": Entry(np.int64, ("sent",)),
    "sent_counted": Entry(np.bool_, ("sent",)),
    "sent_weights": Entry(np.int64, ("sent", "classes")),
    "sent_devices": Entry(np.int64, ("sent", "classes"), least=0),
    "sent_sums": Entry(np.float32, ("sent", "classes", "classes")),
}


@dataclass(frozen=True, slots=True, eq=False)
class SentShare:
    """What went out in a round, and whether the aggregator says that it counted.

    What went out in several rounds for one version is one, under the newest round's number.
    """

    round_id: int
    share: Share
    counted: bool


@dataclass(frozen=True, slots=True)
class SentShares:
    """The shares of the last rounds, oldest first. Immutable: each change gives a new one."""

    shares: tuple[SentShare, ...] = ()

    def sent(self, round_id: int, share: Share) -> SentShares:
        """With one more, which does not count until a receipt says so."""
        others = tuple(one for one in self.shares if one.round_id != round_id)
        return SentShares((*others, SentShare(round_id, share, False))[-_MOST_SHARES:])

    def receipted(self, round_id: int, counted: bool) -> SentShares:
        """With the verdict on the share of ``round_id``, if that one is still known."""
        return SentShares(
            tuple(
                replace(one, counted=counted) if one.round_id == round_id else one
                for one in self.shares
            )
        )

    def in_sums_of(self, rounds: range) -> Share | None:
        """All of ours within the sums of ``rounds``; None where there is nothing of ours."""
        return _total([one for one in self.shares if one.counted and one.round_id in rounds])

    def at(self, summed: range) -> SentShares:
        """What is worth keeping once the sums of the rounds ``summed`` were broadcast.

        Sums of earlier rounds come no more. What counted since then, in however many rounds without
        quorum, waits for one and the same version: it is added up.
        """
        kept = [one for one in self.shares if one.round_id >= summed.start]
        waiting = [one for one in kept if one.counted and one.round_id >= summed.stop]
        total = _total(waiting)
        if total is not None:
            kept = [one for one in kept if one not in waiting]
            kept.append(SentShare(waiting[-1].round_id, total, True))
        return SentShares(tuple(sorted(kept, key=lambda one: one.round_id)))

    def state(self) -> dict[str, NDArray[Any]]:
        """The shares side by side, as ``_SENT`` says; copies."""
        shares = self.shares
        classes = len(shares[0].share.weights) if shares else 0
        weights = np.zeros((len(shares), classes), dtype=np.int64)
        devices = np.zeros_like(weights)
        sums = np.zeros((len(shares), classes, classes), dtype=np.float32)
        for place, one in enumerate(shares):
            weights[place], devices[place] = one.share.weights, one.share.devices
            sums[place] = one.share.sums
        return {
            "sent_rounds": np.asarray([one.round_id for one in shares], dtype=np.int64),
            "sent_counted": np.asarray([one.counted for one in shares], dtype=np.bool_),
            "sent_weights": weights,
            "sent_devices": devices,
            "sent_sums": sums,
        }

    @staticmethod
    def from_state(state: State) -> SentShares:
        """Take ``state()`` back; raises LearnerError where dtypes, shapes or values do not fit."""
        found = unpack(_SENT, state, error=LearnerError)
        rounds, counted, weights, devices, sums = (found[name] for name in _SENT)
        if not ((weights >= devices).all() and (np.diff(rounds) > 0).all()):
            raise LearnerError("the state's sent shares do not fit together")
        columns = (rounds, sums, weights, devices, counted)
        return SentShares(
            tuple(
                SentShare(int(number), Share(total, weight, device, 0), bool(counts))
                for number, total, weight, device, counts in zip(*columns, strict=True)
            )
        )


def _total(sent: Sequence[SentShare]) -> Share | None:
    return functools.reduce(operator.add, [one.share for one in sent]) if sent else None


# A device's teachers by label: the mean knowledge of the other devices.


@dataclass(frozen=True, slots=True, eq=False)
class LabelTeachers:
    """What to learn from, besides the labels.

    Attributes:
        table: float32 [classes, classes], row t = T of label t; uniform where there is none.
        taught: float32 [classes], 1 where label t has a teacher, else 0: its samples train as in
            round 1.
    """

    table: NDArray[np.float32]
    taught: NDArray[np.float32]


def summed_rounds(broadcast: Broadcast) -> range:
    """The rounds whose updates are in the broadcast's sums; empty for none.

    More than one where rounds missed their quorum, and what counted in them was carried over.
    Raises LearnerError where the broadcast does not say so.
    """
    first, last = (int(_tensor(broadcast, name, np.int64, ())) for name in ("first_round", "round"))
    if not (0 < first <= last < broadcast.round_id or first == last == 0):
        raise LearnerError(
            f"the broadcast of round {broadcast.round_id} holds sums of rounds {first} to {last}"
        )
    return range(first, last + 1) if last else range(0)


def leave_one_out(
    broadcast: Broadcast, own: Share | None, training: TeacherLogitsTraining
) -> LabelTeachers:
    """Teachers out of the sums over all devices, less this device's own share.

    AFD (papers/afd), table 3 and equation 6. ``own`` is all that the device added to these very
    sums, None where it added nothing. A label that no other device has is without a teacher. The
    mean is over what came of other devices that have the label (or over their samples, as
    ``weights`` says); with ``normalise`` off the sum is divided by the number of all updates.

    Raises LearnerError where the broadcast's arrays are missing or do not fit.
    """
    classes = training.classes
    means = _tensor(broadcast, "means", np.float32, (classes, classes)).astype(np.float64)
    weights = _tensor(broadcast, "weights", np.int64, (classes,)).copy()
    devices = _tensor(broadcast, "devices", np.int64, (classes,)).copy()
    participants = int(_tensor(broadcast, "participants", np.int64, ()))
    if not np.isfinite(means).all() or min(int(weights.min()), int(devices.min())) < 0:
        raise LearnerError("the broadcast's means are not finite or its counts are negative")
    sums = means * weights[:, None]
    if own is not None:
        if own.sums.shape != sums.shape:
            raise LearnerError(
                f"this device knows {len(own.weights)} classes, the task has {classes}"
            )
        sums -= own.sums
        weights -= own.weights
        devices -= own.devices
    taught = (devices > 0) & (weights > 0)
    table = np.full((classes, classes), 1 / classes)
    divisors = weights[taught] if training.normalise else np.full(int(taught.sum()), participants)
    # Sums of rounded means less a share may end a little below zero: the clip takes that too.
    table[taught] = np.maximum(
        sums[taught] / np.maximum(divisors, 1)[:, None], training.least_teacher
    )
    if training.normalise:
        table /= table.sum(axis=1, keepdims=True)
    return LabelTeachers(table.astype(np.float32), taught.astype(np.float32))


def _tensor(broadcast: Broadcast, name: str, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    array = broadcast.tensors.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise LearnerError(
            f"the broadcast's {name!r} is {found}; expected {np.dtype(dtype)} {shape}"
        )
    return array


class TeacherLogitsLearner(ModelLearner):
    """Trains this device's own model and sends its mean soft output for each label it has.

    Args:
        data: the device's samples, asked for at the start of each round; ``label`` int64 [samples]
            beside the model's own inputs. What this device's model does not read is left aside, so
            that the same data suit unequal models. ``public`` is not used.
        trainer: of an artifact whose loss is ``export.losses``'s. The model stays here.
        sender: the device's name among the task's; not needed here.
        rng: orders the samples.

    Raises ValueError where the artifact's step gives no ``label_sums`` and ``label_counts``.
    """

    needs_receipts = True

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        ports = trainer.artifact.graphs["train"].select("output")
        missing = {"label_sums", "label_counts"} - {port.of for port in ports}
        if missing:
            raise ValueError(
                f"artifact {trainer.artifact.name!r} gives no {' and no '.join(sorted(missing))}: "
                "export it with export.losses's loss"
            )
        self._inputs = {port.of for port in trainer.artifact.graphs["train"].select("batch")}
        super().__init__(data, trainer, sender, rng)
        self._sent = SentShares()

    def receipt(self, round_id: int, *, counted: bool) -> None:
        self._sent = self._sent.receipted(round_id, counted)

    def teachers(self, broadcast: Broadcast) -> LabelTeachers:
        """What this device would learn from in the round; changes nothing.

        Raises LearnerError where the broadcast does not fit.
        """
        own = self._sent.in_sums_of(summed_rounds(broadcast))
        return leave_one_out(
            broadcast, own, TeacherLogitsTraining.from_scalars(broadcast.settings, LearnerError)
        )

    def train(self, broadcast: Broadcast) -> Update:
        """One round; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds ``labels`` uint16 [n], ``counts`` int32 [n] and ``values`` [n, classes] in
        the task's precision (and ``classes`` where only the top ones are sent). A device without
        samples sends an update without labels.

        Raises LearnerError where the broadcast or the data do not fit or training fails; the
        learner is then unchanged.
        """
        training = TeacherLogitsTraining.from_scalars(broadcast.settings, LearnerError)
        teachers = self.teachers(broadcast)
        samples = labelled_samples(self._data().train, self._inputs, training.classes)
        with unchanged_on_error(self._trainer):
            sums, counts, report = self._steps(samples, teachers, training)
            knowledge = _knowledge(sums, counts)
            if training.blend_teacher:
                knowledge = _blend(knowledge, teachers)
            try:
                tensors = encode_knowledge(knowledge, training)
            except ValueError as error:
                raise LearnerError(f"the model's outputs cannot be sent: {error}") from error
            # As the aggregator will read it: rounded, and bounded by the task's settings.
            share = share_of(decode_knowledge(tensors, training), training)
        self._sent = self._sent.at(summed_rounds(broadcast)).sent(broadcast.round_id, share)
        self.report = report
        return Update(broadcast.round_id, tensors)

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The round's steps without teachers, as in round 1."""
        training = TeacherLogitsTraining.from_scalars(broadcast.settings, LearnerError)
        samples = labelled_samples(self._data().train, self._inputs, training.classes)
        uniform = np.full((training.classes,) * 2, 1 / training.classes, dtype=np.float32)
        nobody = LabelTeachers(uniform, np.zeros(training.classes, dtype=np.float32))
        with unchanged_on_error(self._trainer):
            self._steps(samples, nobody, training)

    def state(self) -> State:
        """The trainer's state tensors as ``trainer.*``, and what was sent in the last rounds."""
        return {**trainer_state(self._trainer), **self._sent.state()}

    def restore(self, state: State) -> None:
        """Take ``state()`` back; raises LearnerError where names, dtypes or shapes do not fit."""
        trained = prefixed(TRAINER, part(TRAINER, state))
        sent = SentShares.from_state({n: a for n, a in state.items() if n not in trained})
        restore_trainer(self._trainer, trained)
        self._sent = sent

    def _steps(
        self,
        samples: Mapping[str, NDArray[Any]],
        teachers: LabelTeachers,
        training: TeacherLogitsTraining,
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], StepsReport]:
        """Soft outputs summed by label [classes, classes], their counts [classes], and a report.

        Each output is of the model as it was when the step met the sample (table 2, lines 9 to 15).
        """
        trainer = self._trainer
        extra: dict[str, NDArray[Any]] = {
            "teacher": teachers.table,
            "has_teacher": teachers.taught,
            "weight_ce": np.asarray(training.alpha, dtype=np.float32),
            "weight_teacher": np.asarray(training.beta, dtype=np.float32),
            "weight_kl": np.asarray(training.gamma, dtype=np.float32),
            "l2": np.asarray(training.l2, dtype=np.float32),
        }
        hyper = {"lr": training.learning_rate} if training.learning_rate > 0 else None
        sums = np.zeros((training.classes, training.classes))
        counts = np.zeros(training.classes, dtype=np.int64)
        steps, seen, total = 0, 0, 0.0
        size, epochs = training.batch_size, training.epochs
        least = least_rows(trainer, samples.keys(), len(samples.get(LABEL, ())), size)
        for batch in epoch_batches(samples, size, epochs, self._rng, least):
            rows = len(batch[LABEL])
            batch.update(extra)
            total += trainer.step(batch, hyper=hyper) * rows
            outputs = trainer.outputs
            if outputs["label_sums"].shape != sums.shape:
                raise LearnerError(
                    f"the artifact knows {len(outputs['label_counts'])} classes, the task has "
                    f"{training.classes}"
                )
            sums += outputs["label_sums"]
            counts += outputs["label_counts"].astype(np.int64)
            steps, seen = steps + 1, seen + rows
            if steps == training.most_steps:
                break
        return sums, counts, StepsReport(steps, seen, total / seen if seen else float("nan"))


def _knowledge(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> LabelKnowledge:
    labels = np.flatnonzero(counts)
    totals = sums[labels].sum(axis=1, keepdims=True)
    # Softmax in float32 is a rounding away from a distribution.
    return LabelKnowledge(labels, counts[labels], (sums[labels] / totals).astype(np.float32))


def _blend(knowledge: LabelKnowledge, teachers: LabelTeachers) -> LabelKnowledge:
    """Equation 5, halved: the sum of two distributions is none."""
    taught = teachers.taught[knowledge.labels, None] > 0
    table = teachers.table[knowledge.labels]
    table = table / table.sum(axis=1, keepdims=True)
    means = np.where(taught, (knowledge.means + table) / 2, knowledge.means).astype(np.float32)
    return LabelKnowledge(knowledge.labels, knowledge.counts, means)
