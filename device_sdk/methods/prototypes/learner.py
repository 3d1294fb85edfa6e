"""The device's half of federated prototypes: learn from labels, close to what others see in them.

Method: FedProto (Tan et al. 2022, "FedProto: Federated prototype learning across heterogeneous
clients", algorithm 1). FedTGP (Zhang et al. 2024) is the same on a device. Devices may have models
of any kind, of which only the embedding's width is common: mean embeddings by label are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.local_data import DataSource
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import (
    LABEL,
    Batch,
    EachStep,
    Epochs,
    ModelLearner,
    StepsReport,
    labelled_samples,
    predict_all,
    train_epochs,
    unchanged_on_error,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update

_EMBEDDING = "embedding"


class PrototypesLearner(ModelLearner):
    """Trains this device's own model and sends its mean embedding of each label it has.

    Args:
        data: the device's samples, asked for at the start of each round; ``label`` int64 [samples]
            beside the model's own inputs. What this device's model does not read is left aside.
            ``public`` is not used.
        trainer: of an artifact whose loss is ``export.losses.prototype_alignment``, and whose
            predictions hold ``embedding`` [samples, width]. The model stays here.
        sender: the device's name among the task's; not needed here.
        rng: orders the samples.

    Raises ValueError where the artifact's step takes no ``prototype``.
    """

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        super().__init__(data, trainer, sender, rng)
        graphs = trainer.artifact.graphs
        self._inputs = {port.of for port in graphs["train"].select("batch")}
        self._read = {port.of for port in graphs["infer"].select("batch")}
        if "prototype" not in self._inputs:
            raise ValueError(
                f"artifact {trainer.artifact.name!r} takes no 'prototype': export it with "
                "export.losses.prototype_alignment's loss"
            )

    def train(self, broadcast: Broadcast) -> Update:
        """One round; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds ``labels`` uint16 [n], ``counts`` int32 [n] and ``prototypes`` float32
        [n, width] of the model after the round (FedProto, equation 3, with the embeddings of
        prediction: without dropout). A device without samples sends an update without labels.

        Raises LearnerError where the broadcast or the data do not fit or training fails; the
        learner is then unchanged.
        """
        training = PrototypesTraining.from_scalars(broadcast.settings, LearnerError)
        extra = _pulled_to(broadcast, training)
        samples = labelled_samples(self._data().train, self._inputs, training.classes)
        with unchanged_on_error(self._trainer):
            report = self._steps(samples, extra, training)
            try:
                tensors = encode_prototypes(self._prototypes(samples, training.width))
            except ValueError as error:
                raise LearnerError(f"the model's embeddings cannot be sent: {error}") from error
        self.report = report
        return Update(broadcast.round_id, tensors)

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The round's steps without anything to be pulled to."""
        training = PrototypesTraining.from_scalars(broadcast.settings, LearnerError)
        samples = labelled_samples(self._data().train, self._inputs, training.classes)
        nothing: dict[str, NDArray[Any]] = {
            "prototypes": np.zeros((training.classes, training.width), dtype=np.float32),
            "devices": np.zeros(training.classes, dtype=np.int64),
        }
        with unchanged_on_error(self._trainer):
            extra = _pulled_to(replace(broadcast, tensors=nothing), training)
            self._steps(samples, extra, training)

    def _steps(
        self, samples: Batch, extra: Mapping[str, NDArray[Any]], training: PrototypesTraining
    ) -> StepsReport:
        passes = Epochs(training.batch_size, training.epochs, training.most_steps)
        hyper = {"lr": training.learning_rate} if training.learning_rate > 0 else None
        return train_epochs(self._trainer, samples, passes, self._rng, EachStep(hyper, extra))

    def _prototypes(self, samples: Batch, width: int) -> LabelKnowledge:
        """Mean embeddings by label; raises ValueError where the model's are of another width."""
        label = samples.get(LABEL, np.empty(0, dtype=np.int64))
        if not len(label):
            none = np.empty(0, dtype=np.int64)
            return LabelKnowledge(none, none, np.empty((0, width), dtype=np.float32))
        read = {name: array for name, array in samples.items() if name in self._read}
        found = predict_all(self._trainer, read, _EMBEDDING)
        if found.shape[1:] != (width,):
            raise ValueError(f"they are {found.shape[1:]} wide, the task's ({width},)")
        labels, place, counts = np.unique(label, return_inverse=True, return_counts=True)
        sums = np.zeros((len(labels), width))
        np.add.at(sums, place, found)
        return LabelKnowledge(labels, counts, (sums / counts[:, None]).astype(np.float32))


def _pulled_to(broadcast: Broadcast, training: PrototypesTraining) -> dict[str, NDArray[Any]]:
    """What each batch holds beside its samples. Raises LearnerError for arrays that do not fit."""
    table, devices = (broadcast.tensors.get(name) for name in ("prototypes", "devices"))
    shape = (training.classes, training.width)
    if table is None or table.dtype not in (np.float32, np.float16) or table.shape != shape:
        raise LearnerError(f"the broadcast's 'prototypes' are expected to be float32 {shape}")
    if devices is None or devices.dtype != np.int64 or devices.shape != shape[:1]:
        raise LearnerError(f"the broadcast's 'devices' are expected to be int64 {shape[:1]}")
    if not np.isfinite(table).all():
        raise LearnerError("the broadcast's prototypes are not finite")
    return {
        "prototype": table.astype(np.float32),
        "has_prototype": (devices > 0).astype(np.float32),
        "pull": np.asarray(training.pull, dtype=np.float32),
    }
