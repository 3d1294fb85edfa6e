"""The device's half of federated averaging: some steps from the broadcast's model, then how far
they led.

Methods: FedAvg and FedSGD (McMahan et al. 2017, Communication-efficient learning of deep networks
from decentralized data, algorithm 1), FedProx (Li et al. 2020, Federated optimization in
heterogeneous networks, eq. 2) and FedPer (Arivazhagan et al. 2019, Federated learning with
personalization layers); :mod:`device_sdk.methods.fedavg.personal` has a model for each device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.local_data import DataSource
from device_sdk.methods.fedavg.contract import (
    FedAvgTraining,
    SharedTensor,
    exact_names,
    first_name,
    own_name,
    own_rung,
    personal_obstacle,
    shared_tensors,
    tensors_of,
)
from device_sdk.methods.fedavg.personal import CHOICES, Beginning, Ending, fine_tuned, model_of
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import ModelLearner, unchanged_on_error
from device_sdk.methods.state import State, part, prefixed
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Scalar, Update

Tensors = Mapping[str, NDArray[Any]]
Layout = tuple[SharedTensor, ...]
_KEPT = "kept."
"""Before what a choice of ``personalise`` keeps beside the device's model, in the state."""
_REHEARSAL_RATE = 1e-9


class FedAvgLearner(ModelLearner):
    """Trains the broadcast's model on the device's samples.

    Args:
        data: the device's samples, asked for at the start of each round; only ``train`` is used.
        trainer: of the task's artifact. Between rounds it holds this device's own model; see
            ``FedAvgTraining.personalise``.
        sender: the device's name among the task's; not needed here.
        rng: orders the samples.
    """

    rehearses = True

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        super().__init__(data, trainer, sender, rng)
        self._layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}
        submodel = trainer.artifact.submodel
        self._rung = 0 if submodel is None else submodel.rung
        self._begins = True
        """Whether this device has no model yet, so that its personal layers are the task's."""
        self._kept: State = {}

    def train(self, broadcast: Broadcast) -> Update:
        """One round; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds, for each shared tensor, how far training moved it from the broadcast's
        value, float32 (differences are small: float16 and int8 cost them less than they would cost
        the values). Metadata: ``loss``, the mean over the round's steps, and ``samples``, the
        number of training samples, unless all devices count the same.

        Raises LearnerError where the broadcast does not fit the artifact, there are no samples, or
        training fails; the trainer is then unchanged.
        """
        training = FedAvgTraining.from_scalars(broadcast.settings, LearnerError)
        layout, held = self._layout(training)
        with unchanged_on_error(self._trainer):
            own = None if self._begins else self._own(training)
            told = self._take(broadcast, layout, held)
            beginning = self._beginning(training, layout, own)
            ending = self._trained(beginning)
            moved = _differences(ending, told, layout)
        self._begins, self._kept = False, prefixed(f"{training.personalise}.", ending.kept)
        metadata: dict[str, Scalar] = {"loss": ending.report.loss}
        if training.weighting == "samples":
            metadata["samples"] = beginning.data.samples
        if told is not broadcast.tensors:
            metadata["rung"] = self._rung
        return Update(broadcast.round_id, moved, metadata, exact=exact_names(layout))

    def wants_alone(self, broadcast: Broadcast) -> Sequence[str]:
        """The submodel's first values, which its artifact does not bring."""
        name = first_name(self._rung)
        return [name] if self._rung and name in broadcast.offered else []

    def train_alone(self, broadcast: Broadcast, *, begins: bool) -> None:
        """The round's steps, personal layers and all."""
        training = FedAvgTraining.from_scalars(broadcast.settings, LearnerError)
        with unchanged_on_error(self._trainer):
            if begins and self._rung and broadcast.attachments:
                given = self._given(broadcast, first_name(self._rung), self._everything())
                self._trainer.set_parameters(given)
            fine_tuned(self._beginning(training, self._layout(training)[0], None))

    def rehearse(self, broadcast: Broadcast) -> None:
        """The round's steps from whatever the trainer holds, and so short that they stay near it:
        steps of the round's length from stand-ins may lead to what is not finite."""
        training = FedAvgTraining.from_scalars(broadcast.settings, LearnerError)
        if "lr" in self._trainer.hyper:
            training = replace(training, learning_rate=_REHEARSAL_RATE)
        layout, _ = self._layout(training)
        # With a model of its own: a device's first round may be shorter than those that follow.
        self._trained(self._beginning(training, layout, self._own(training)))

    def wants(self, broadcast: Broadcast) -> Sequence[str]:
        """The submodel that this device trains, where the task's model has such, and to begin with
        its personal layers."""
        wanted = [self._rung_of(broadcast), own_name(self._rung) if self._begins else None]
        return [name for name in wanted if name is not None and name in broadcast.offered]

    def state(self) -> State:
        """The trainer's state, as ``trainer.*``, and what the choice keeps beside it."""
        return {**super().state(), **prefixed(_KEPT, self._kept)}

    def restore(self, state: State) -> None:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        kept = part(_KEPT, state)
        for name, array in kept.items():
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise LearnerError(f"the state's {_KEPT + name!r} is not finite float32")
        super().restore({n: array for n, array in state.items() if not n.startswith(_KEPT)})
        self._begins, self._kept = False, kept

    def _rung_of(self, broadcast: Broadcast) -> str | None:
        """The attachment with the submodel that this device trains in this round."""
        names = broadcast.attachments or broadcast.offered
        return own_rung(names, self._rung, broadcast.round_id, self._sender)

    def _own(self, training: FedAvgTraining) -> dict[str, NDArray[Any]] | None:
        """The device's own model, where the round has a use for it."""
        return None if training.personalise == "fine-tuned" else model_of(self._trainer)

    def _beginning(
        self, training: FedAvgTraining, layout: Layout, own: dict[str, NDArray[Any]] | None
    ) -> Beginning:
        shared = tuple(one.name for one in layout if one.kind == "parameter")
        kept = part(f"{training.personalise}.", self._kept)
        return Beginning(self._trainer, training, self._data(), self._rng, shared, own, kept)

    def _trained(self, beginning: Beginning) -> Ending:
        obstacle = personal_obstacle(beginning.training, self._trainer.artifact)
        if obstacle:
            raise LearnerError(obstacle)
        return CHOICES[beginning.training.personalise](beginning)

    def adopt(self, broadcast: Broadcast) -> bool:
        """Take over the broadcast's model without training, to predict with what all made.

        Personal layers stay the device's, and so does a whole model of its own. Raises LearnerError
        where the broadcast does not fit.
        """
        training = FedAvgTraining.from_scalars(broadcast.settings, LearnerError)
        if training.personalise != "fine-tuned" and not self._begins:
            return False
        return self.receive(broadcast)

    def receive(self, broadcast: Broadcast) -> bool:
        """See :class:`~device_sdk.methods.learner.Learner`."""
        layout, held = self._layout(FedAvgTraining.from_scalars(broadcast.settings, LearnerError))
        with unchanged_on_error(self._trainer):
            self._take(broadcast, layout, held)
        return True

    def carries_over(self, broadcast: Broadcast) -> bool:
        """Where a model or layers are personal, momenta go on, or a buffer that moves is not
        shared."""
        training = FedAvgTraining.from_scalars(broadcast.settings, LearnerError)
        if training.personalise != "fine-tuned":
            return True
        shared = {one.name for one in self._layout(training)[0]}
        everything = {*self._trainer.parameters, *self._trainer.buffers}
        moved = everything - self._trainer.artifact.frozen_members
        return training.optimizer_state != "fresh" or not moved <= shared

    def _layout(self, training: FedAvgTraining) -> tuple[Layout, Layout]:
        """What travels both ways, and what comes down alone."""
        trainer, known = self._trainer, (training.personal, *map(str, self._trainer.axes.values()))
        if known not in self._layouts:
            try:
                self._layouts[known] = tensors_of(
                    trainer.artifact, trainer.parameters, trainer.buffers, training.personal_names
                )
            except ValueError as error:
                raise LearnerError(str(error)) from error
        return self._layouts[known]

    def _take(self, broadcast: Broadcast, layout: Layout, held: Layout) -> Tensors:
        """Begin with the broadcast's model, or with the submodel attached to it, which brings what
        is held too; what was begun with."""
        name = self._rung_of(broadcast)
        attached = None if name is None else broadcast.attachments.get(name)
        told = broadcast.tensors
        if attached is not None:
            told, layout = attached.tensors, (*layout, *held)
        names = {one.wire_name for one in layout}
        if set(told) != names:
            odd = sorted(names ^ set(told))[0]
            side = "lacks" if odd in names else "has the unknown"
            raise LearnerError(
                f"the broadcast {side} tensor {odd!r}: it is of another model than the artifact"
            )
        values: dict[str, NDArray[Any]] = {}
        for one in layout:
            value = told[one.wire_name]
            if value.shape != one.wire_shape or value.dtype not in (np.float32, np.float16):
                raise LearnerError(
                    f"the broadcast's {one.wire_name!r} is {value.dtype} {value.shape}; expected "
                    f"float32 {one.wire_shape}"
                )
            if not np.isfinite(value).all():
                raise LearnerError(f"the broadcast's {one.wire_name!r} is not finite")
            values[one.name] = value.astype(np.float32).reshape(one.shape)
        if self._begins:
            values.update(self._own_of(broadcast, layout))
        self._trainer.set_parameters(values)
        return told

    def _own_of(self, broadcast: Broadcast, layout: Layout) -> dict[str, NDArray[Any]]:
        """The first values of personal layers, where the artifact has none."""
        name, shared = own_name(self._rung), {one.name for one in layout}
        if name not in broadcast.attachments:
            return {}
        return self._given(broadcast, name, [e for e in self._everything() if e.name not in shared])

    def _everything(self) -> Layout:
        """What a task may bring of the artifact's model."""
        trainer = self._trainer
        fixed = trainer.artifact.fixed
        return shared_tensors(trainer.parameters, trainer.buffers, (), fixed)

    def _given(
        self, broadcast: Broadcast, name: str, wanted: Sequence[SharedTensor]
    ) -> dict[str, NDArray[Any]]:
        """The values of an attachment, which holds these tensors; by torch's names."""
        own, given = {one.wire_name: one for one in wanted}, broadcast.attachments.get(name)
        if given is None or set(given.tensors) != set(own):
            raise LearnerError(f"the task's {name!r} holds other values than the artifact lacks")
        found = {}
        for key, value in given.tensors.items():
            if value.shape != own[key].wire_shape or not np.isfinite(value).all():
                raise LearnerError(f"the task's {key!r} in {name!r} does not fit the artifact")
            found[own[key].name] = value.astype(np.float32).reshape(own[key].shape)
        return found


def _differences(ending: Ending, told: Tensors, layout: Layout) -> dict[str, NDArray[np.float32]]:
    return {
        one.wire_name: (
            ending.trained[one.name].reshape(one.wire_shape)
            - told[one.wire_name].astype(np.float32)
        )
        for one in layout
    }
