"""The device's half: train, send the largest changes, remember the rest.

Top-k sparsification with error feedback: Stich et al. 2018, Sparsified SGD with memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import layout_of
from device_sdk.local_data import DataSource
from device_sdk.methods.learner import Learner, LearnerError, State
from device_sdk.methods.local_steps import train_epochs, unchanged_on_error
from device_sdk.methods.state import COUNT, Entry, unpack
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update
from sparse_yogi.contract import SparseTraining

Floats = NDArray[np.float32]


class SparseYogiLearner(Learner):
    """Trains the broadcast's model; what it does not send now is added to what it finds next time.

    An update that was not counted is added to it again: ``receipt`` says which were.
    """

    needs_receipts = True

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        self._data, self._trainer, self._rng = data, trainer, rng
        self._layout = layout_of(trainer.artifact)
        self._left: Floats = np.zeros(self._layout.size, np.float32)
        """What training moved and nobody was told, [p]."""
        self._sent: Floats = np.zeros(self._layout.size, np.float32)
        """What the last update told, [p], until it is known whether it counted."""
        self._sent_round = 0

    def train(self, broadcast: Broadcast) -> Update:
        """The update holds ``places`` int32 [m], rising, and ``values`` float32 [m].

        Metadata: ``loss``. Raises LearnerError where the broadcast does not fit, there are no
        samples, or training fails.
        """
        training, model = self._read(broadcast)
        samples = self._data().train
        with unchanged_on_error(self._trainer):
            self._trainer.reset()  # no momenta of an earlier round
            self._trainer.set_parameters(self._layout.unflatten(model))
            report = train_epochs(
                self._trainer,
                samples,
                batch_size=training.batch_size,
                epochs=training.epochs,
                rng=self._rng,
                hyper={"lr": training.learning_rate},
            )
            if report.steps == 0:
                raise LearnerError("there are no local samples to train on")
            moved = self._layout.flatten(self._trainer.parameters) - model
        # An update without a verdict is taken for not counted, as ``_sent`` still holds it.
        wanted = moved + self._left + self._sent
        count = training.kept(len(wanted))
        places = np.sort(np.argpartition(np.abs(wanted), -count)[-count:])
        self._sent = np.zeros_like(wanted)
        self._sent[places] = wanted[places]
        self._left = wanted - self._sent
        self._sent_round = broadcast.round_id
        tensors = {"places": places.astype(np.int32), "values": wanted[places]}
        return Update(broadcast.round_id, tensors, {"loss": report.loss})

    def receipt(self, round_id: int, *, counted: bool) -> None:
        """What did not count is told again."""
        if round_id == self._sent_round:
            if not counted:
                self._left = self._left + self._sent
            self._sent = np.zeros_like(self._sent)
            self._sent_round = 0

    def adopt(self, broadcast: Broadcast) -> bool:
        """The rounds are over: predict with what all made."""
        self._trainer.set_parameters(self._layout.unflatten(self._read(broadcast)[1]))
        return True

    def state(self) -> State:
        """What must survive a restart beside the model, which each broadcast brings anew."""
        return {
            "left": self._left.copy(),
            "sent": self._sent.copy(),
            "sent_round": np.asarray(self._sent_round, np.int64),
        }

    def restore(self, state: State) -> None:
        """Raises LearnerError where names, dtypes or shapes do not fit."""
        values = Entry(np.float32, (self._layout.size,))
        schema = {"left": values, "sent": values, "sent_round": COUNT}
        found = unpack(schema, state, error=LearnerError)
        self._left, self._sent = found["left"], found["sent"]
        self._sent_round = int(found["sent_round"])

    def _read(self, broadcast: Broadcast) -> tuple[SparseTraining, Floats]:
        training = SparseTraining.from_scalars(broadcast.settings, LearnerError)
        model = broadcast.tensors.get("model")
        if model is None or model.dtype.kind != "f" or model.shape != (self._layout.size,):
            raise LearnerError("the broadcast's model is of another artifact than this device's")
        return training, model.astype(np.float32)
