"""The device's half of teacher-logit aggregation: learn from labels, and from what others predict.

Methods: AFD (papers/afd: equations 1 to 6, table 2) and plain federated distillation (Jeong et al.
2018), which is AFD without divergence and weight penalty. Devices may have models of any kind: only
mean soft outputs by label are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.local_data import DataSource
from device_sdk.methods.learner import Learner, LearnerError, State
from device_sdk.methods.local_steps import (
    LABEL,
    TRAINER,
    StepsReport,
    epoch_batches,
    labelled_samples,
    least_rows,
    restore_trainer,
    trainer_state,
    unchanged_on_error,
)
from device_sdk.methods.state import part, prefixed
from device_sdk.methods.teacher_logits.contract import (
    LabelKnowledge,
    TeacherLogitsTraining,
    decode_knowledge,
    encode_knowledge,
    share_of,
)
from device_sdk.methods.teacher_logits.knowledge import (
    LabelTeachers,
    SentShares,
    leave_one_out,
    summed_rounds,
)
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update


class TeacherLogitsLearner(Learner):
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
        self._data = data
        self._trainer = trainer
        self._sender = sender
        self._rng = rng
        self._sent = SentShares()
        self._report = StepsReport()

    @property
    def trainer(self) -> Trainer:
        """The device's model."""
        return self._trainer

    @property
    def report(self) -> StepsReport:
        """Steps, samples and mean joint loss of the last round."""
        return self._report

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
        self._report = report
        return Update(broadcast.round_id, tensors)

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
