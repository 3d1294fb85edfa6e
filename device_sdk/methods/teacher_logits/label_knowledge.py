"""What one device knows about each label, and what of it enters the aggregator's sums.

Both ends compute :func:`share_of` from the same decoded arrays: a device can subtract from a sum
exactly what the aggregator added for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.soft_outputs import decode_soft_outputs, encode_soft_outputs

__all__ = ["LabelKnowledge", "Share", "decode_knowledge", "encode_knowledge", "share_of"]

_MOST_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LabelKnowledge:
    """Mean soft outputs by label, of the labels that a device has.

    Attributes:
        labels: int64 [n], increasing.
        counts: int64 [n], the outputs that went into each mean, at least 1.
        means: float32 [n, classes], each row a distribution.
    """

    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    means: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What a device adds to the sums over devices.

    Attributes:
        sums: float32 [classes, classes], row t = weight times the mean output of label t; zero for
            labels that the device lacks.
        weights: int64 [classes], 0 for labels that it lacks.
        devices: int64 [classes], 1 for labels that it has, else 0.
        bounded: labels whose confidence lay outside the task's bounds.
    """

    sums: NDArray[np.float32]
    weights: NDArray[np.int64]
    devices: NDArray[np.int64]
    bounded: int

    def __add__(self, other: Share) -> Share:
        """What a device adds in two rounds of one version."""
        return Share(
            self.sums + other.sums,
            self.weights + other.weights,
            self.devices + other.devices,
            self.bounded + other.bounded,
        )


def encode_knowledge(
    knowledge: LabelKnowledge, training: TeacherLogitsTraining
) -> dict[str, NDArray[Any]]:
    """``labels`` uint16 [n], ``counts`` int32 [n], and the means as soft outputs.

    Raises ValueError where a mean is no distribution.
    """
    return {
        "labels": knowledge.labels.astype(np.uint16),
        "counts": np.minimum(knowledge.counts, _MOST_COUNT).astype(np.int32),
        **encode_soft_outputs(knowledge.means, training.form),
    }


def decode_knowledge(
    tensors: Mapping[str, NDArray[Any]], training: TeacherLogitsTraining
) -> LabelKnowledge:
    """What :func:`encode_knowledge` was given, rounded.

    Total: raises ValueError for other names, dtypes, shapes or ranges, whatever the arrays hold.
    """
    expected = {"labels", "counts", *training.form.names(training.classes)}
    if set(tensors) != expected:
        raise ValueError(f"found {sorted(tensors)}; expected exactly {sorted(expected)}")
    labels, counts = tensors["labels"], tensors["counts"]
    if labels.dtype != np.uint16 or labels.ndim != 1:
        raise ValueError(f"'labels' are {labels.dtype} {labels.shape}; expected uint16 [n]")
    rows = labels.astype(np.int64)
    if len(rows) and (int(rows[-1]) >= training.classes or (np.diff(rows) <= 0).any()):
        raise ValueError(f"'labels' must increase, from 0 to {training.classes - 1}")
    if counts.dtype != np.int32 or counts.shape != rows.shape:
        raise ValueError(f"'counts' are {counts.dtype} {counts.shape}; expected int32 [labels]")
    if len(counts) and int(counts.min()) < 1:
        raise ValueError("a count is below 1: labels without samples are left out")
    means = decode_soft_outputs(tensors, len(rows), training.classes, training.form)
    return LabelKnowledge(rows, counts.astype(np.int64), means)


def share_of(knowledge: LabelKnowledge, training: TeacherLogitsTraining) -> Share:
    """What decoded knowledge adds to the sums, its confidence held within the task's bounds."""
    means, bounded = _bounded(knowledge, training)
    if training.weights == "samples":
        weight = np.minimum(knowledge.counts, training.most_samples)
    else:
        weight = np.ones(len(knowledge.labels), dtype=np.int64)
    sums = np.zeros((training.classes, training.classes), dtype=np.float32)
    weights = np.zeros(training.classes, dtype=np.int64)
    sums[knowledge.labels] = means * weight[:, None].astype(np.float32)
    weights[knowledge.labels] = weight
    return Share(sums, weights, (weights > 0).astype(np.int64), bounded)


def _bounded(
    knowledge: LabelKnowledge, training: TeacherLogitsTraining
) -> tuple[NDArray[np.float32], int]:
    """The means with each label's own probability clipped and the others scaled to match."""
    means = knowledge.means.astype(np.float64)
    places = np.arange(len(means))
    own = means[places, knowledge.labels]
    wanted = np.clip(own, training.least_confidence, training.most_confidence)
    outside = wanted != own
    if not outside.any():
        return knowledge.means, 0
    others = 1 - own
    # A device that claims certainty leaves nothing to scale: the rest is spread evenly.
    scale = np.where(others > 1e-12, (1 - wanted) / np.maximum(others, 1e-12), 0.0)
    spread = np.where(others > 1e-12, 0.0, (1 - wanted) / (training.classes - 1))
    moved = means * scale[:, None] + spread[:, None]
    moved[places, knowledge.labels] = wanted
    return np.where(outside[:, None], moved, means).astype(np.float32), int(outside.sum())
