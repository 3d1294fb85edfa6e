"""The learners of methods that train on local arrays, by the method's name.

A new method adds its line to ``ARRAY_LEARNERS``; its module is imported when a task needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from device_sdk.local_data import DataSource
from device_sdk.methods.learner import Learner
from device_sdk.train.job import Declined
from device_sdk.train.options import TrainingOptions
from device_sdk.trainer import Trainer

__all__ = ["ARRAY_LEARNERS", "PLACED_METHODS", "RECEIPT_METHODS", "LearnerParts"]


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of. ``companion``: of the artifact that belongs to the model's, if
    the task has such (attention's meta-network)."""

    data: DataSource
    trainer: Trainer
    companion: Trainer | None
    sender: str
    rng: np.random.Generator
    options: TrainingOptions


def _fedavg(parts: LearnerParts) -> Learner:
    from device_sdk.methods.fedavg.learner import FedAvgLearner

    return FedAvgLearner(parts.data, parts.trainer, parts.sender, parts.rng)


def _teacher_logits(parts: LearnerParts) -> Learner:
    from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner

    return TeacherLogitsLearner(parts.data, parts.trainer, parts.sender, parts.rng)


def _mutual(parts: LearnerParts) -> Learner:
    from device_sdk.methods.mutual.learner import MutualLearner

    return MutualLearner(parts.data, parts.trainer, parts.sender, parts.rng)


def _attention(parts: LearnerParts) -> Learner:
    from device_sdk.methods.attention.learner import AttentionLearner

    placement = parts.options.placement
    if placement == "auto":
        # Nothing was measured yet.
        placement = "aggregator" if parts.companion is None else "device"
    if placement == "device" and parts.companion is None:
        raise Declined("the task offers no meta-network for this artifact; see placement")
    return AttentionLearner(
        parts.data, parts.trainer, parts.companion, parts.sender, parts.rng, placement
    )


ARRAY_LEARNERS: Mapping[str, Callable[[LearnerParts], Learner]] = {
    "fedavg": _fedavg,
    "teacher_logits": _teacher_logits,
    "mutual": _mutual,
    "attention": _attention,
}
"""By method's name."""

PLACED_METHODS = frozenset({"attention"})
"""Those whose learner is a :class:`~device_sdk.train.placement.PlacedLearner`."""

RECEIPT_METHODS = frozenset({"teacher_logits"})
"""Those whose learner is a :class:`~device_sdk.methods.learner.ReceiptLearner`."""
