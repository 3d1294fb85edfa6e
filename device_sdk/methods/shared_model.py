"""The device's half of methods that train one model for all: what they get for free.

The aggregator's half is :mod:`aggregator.methods.shared_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import layout_of
from device_sdk.fields import Within
from device_sdk.methods.learner import Learner, LearnerError
from device_sdk.methods.state import COUNT, Entry, Schema, State, Stateful, unpack
from device_sdk.wire.arrays.exchange import Broadcast, TrainingInPasses, Update
from device_sdk.wire.publish.report import Reason

if TYPE_CHECKING:
    # It loads onnxruntime, and the aggregator imports the settings from here.
    from device_sdk.local_data import DataSource
    from device_sdk.methods.local_steps import StepsReport
    from device_sdk.trainer import Trainer

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SharedModelTraining(TrainingInPasses):
    """How every device trains in a round. A method's own settings are further fields of a subclass.

    Attributes:
        epochs: passes over the local samples; 0 for one, or for as many as 30 steps take.
        batch_size: samples a step.
        learning_rate: of the artifact's optimizer.

    Raises ValueError, naming the setting.
    """

    epochs: Annotated[int, Within(0)] = 0
    batch_size: Annotated[int, Within(1)] = 32
    learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.05


class SharedModelLearner(Stateful, Learner):
    """Trains the broadcast's ``model`` on local samples, and sends what training moved.

    A method says in :meth:`tensors` what it sends of that. What has to survive between rounds are
    vectors [p] named in ``VECTORS``: ``left`` is the attribute ``_left``, float32, at first zero.
    With ``needs_receipts``, :meth:`verdict` is called once for each update, before the next.
    """

    training_class: ClassVar[type[SharedModelTraining]] = SharedModelTraining
    VECTORS: ClassVar[tuple[str, ...]] = ()

    _sent_round: int
    """Of the update whose verdict is open; 0 without one."""

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        self._data, self._trainer, self._rng = data, trainer, rng
        self._layout = layout_of(trainer.artifact)
        self._sent_round = 0
        for name in self.VECTORS:
            setattr(self, f"_{name}", np.zeros(self._layout.size, np.float32))

    def tensors(self, moved: Floats, training: Any) -> Arrays:
        """What is sent of what training moved.

        Args:
            moved: the model after training less the broadcast's, float32 [p].
            training: the broadcast's settings, a ``training_class``.

        Returns ``moved`` float32 [p]; or of the places that are sent, ``places`` int32 [m], rising,
        and ``values`` float32 [m]. Here: all.
        """
        return {"moved": moved}

    def verdict(self, *, counted: bool) -> None:
        """Whether the last update counted. Here: no matter."""

    def train(self, broadcast: Broadcast) -> Update:
        """The update of :meth:`tensors`. Metadata: ``loss``.

        Raises LearnerError where the broadcast does not fit, there are no samples, or training
        fails.
        """
        from device_sdk.methods.local_steps import unchanged_on_error

        training, model = self._read(broadcast)
        with unchanged_on_error(self._trainer):
            report = self._steps(training, model)
            moved = self._layout.flatten(self._trainer.parameters) - model
        self.receipt(self._sent_round, counted=False)  # of one that got no verdict
        tensors = self.tensors(moved, training)
        self._sent_round = broadcast.round_id
        return Update(broadcast.round_id, tensors, {"loss": report.loss})

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The round's steps."""
        from device_sdk.methods.local_steps import unchanged_on_error

        training = self.training_class.from_scalars(broadcast.settings, LearnerError)
        with unchanged_on_error(self._trainer):
            self._steps(training, self._layout.flatten(self._trainer.parameters))

    def _steps(self, training: SharedModelTraining, model: Floats) -> StepsReport:
        from device_sdk.methods.local_steps import EachStep, Epochs, train_epochs

        self._trainer.reset()  # no momenta of an earlier round
        self._trainer.set_parameters(self._layout.unflatten(model))
        passes = Epochs(training.batch_size, training.epochs)
        each = EachStep({"lr": training.learning_rate})
        report = train_epochs(self._trainer, self._data().train, passes, self._rng, each)
        if report.steps == 0:
            raise LearnerError("there are no local samples to train on", Reason.NO_DATA)
        return report

    def receipt(self, round_id: int, *, counted: bool) -> None:
        """Passes each verdict on once."""
        if round_id == self._sent_round != 0:
            self.verdict(counted=counted)
            self._sent_round = 0

    def adopt(self, broadcast: Broadcast) -> bool:
        """The rounds are over: predict with what all made."""
        self._trainer.set_parameters(self._layout.unflatten(self._read(broadcast)[1]))
        return True

    def restore(self, state: State) -> None:
        """Raises LearnerError where names, dtypes or shapes do not fit."""
        unpack(self._schema(), state, error=LearnerError)
        super().restore(state)

    def _schema(self) -> Schema:
        vectors = dict.fromkeys(self.VECTORS, Entry(np.float32, (self._layout.size,)))
        return {**vectors, "sent_round": COUNT} if self.needs_receipts else vectors

    def _read(self, broadcast: Broadcast) -> tuple[SharedModelTraining, Floats]:
        training = self.training_class.from_scalars(broadcast.settings, LearnerError)
        model = broadcast.tensors.get("model")
        if model is None or model.dtype.kind != "f" or model.shape != (self._layout.size,):
            raise LearnerError("the broadcast's model is of another artifact than this device's")
        return training, model.astype(np.float32)
