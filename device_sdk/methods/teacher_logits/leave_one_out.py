"""A device's teachers by label: the mean knowledge of the other devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.label_knowledge import Share
from device_sdk.wire.arrays.exchange import Broadcast

__all__ = ["LabelTeachers", "leave_one_out", "summed_rounds"]


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
