"""Devices that lie about what they know."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import Learner, State
from device_sdk.methods.teacher_logits.contract import (
    LabelKnowledge,
    TeacherLogitsTraining,
    encode_knowledge,
)
from device_sdk.wire.arrays.exchange import Broadcast, Update

Claims = Callable[[int], NDArray[np.float32]]
"""From the number of classes to mean outputs by label, [classes, classes]."""


class LyingTeacher(Learner):
    """Sends ``claims`` of every label in each round, and that it has as many samples as count."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def train(self, broadcast: Broadcast) -> Update:
        """See :class:`device_sdk.methods.learner.Learner`."""
        training = TeacherLogitsTraining.from_scalars(broadcast.settings)
        labels = np.arange(training.classes)
        claimed = np.full(training.classes, training.most_samples)
        knowledge = LabelKnowledge(labels, claimed, self._claims(training.classes))
        return Update(broadcast.round_id, encode_knowledge(knowledge, training))

    def state(self) -> State:
        """Nothing."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing to take back."""


def random_claims(rng: np.random.Generator) -> Claims:
    """Softmax of normal logits of deviation 3, drawn anew each time."""

    def claims(classes: int) -> NDArray[np.float32]:
        logits = 3 * rng.standard_normal((classes, classes))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return shares.astype(np.float32)

    return claims


def other_labels(classes: int) -> NDArray[np.float32]:
    """Certain of the next class in place of the label's own: of two, the opposite."""
    return np.roll(np.eye(classes, dtype=np.float32), 1, axis=1)


def last_class(classes: int) -> NDArray[np.float32]:
    """Certain of the last class whatever the label: of two, that all is clicked."""
    found = np.zeros((classes, classes), dtype=np.float32)
    found[:, -1] = 1
    return found
