"""The training settings that a teacher-logits broadcast carries, known to both ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.methods.labels import MOST_CLASSES, decode_labels, encode_labels
from device_sdk.methods.labels import LabelKnowledge as LabelKnowledge
from device_sdk.wire.arrays.exchange import TrainingSettings

# Soft outputs (rows of probabilities over classes) as compact arrays, the same on both ends.
#
# The arrays are of dtypes that travel as they are (``tensors.py``), so that a device knows to
# the bit what the aggregator reads, whatever codec its float32 arrays travel under.

Precision = Literal["float32", "float16", "int8"]
_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}
_STEPS = 255
# Of a sum of up to 4,096 probabilities, each rounded to float16.
_SUM_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class SoftForm(Declared):
    """How soft outputs travel.

    Attributes:
        precision: of a probability; ``int8`` is a number of 255ths, and those of a row are rounded
            so that they still add up.
        top: only the ``top`` most probable classes of a row are sent, what is left of the
            probability is spread evenly over the others; 0 for all classes.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    precision: Precision = "float16"
    top: Annotated[int, Within(0, MOST_CLASSES)] = 0

    def width(self, classes: int) -> int:
        """How many probabilities a row carries."""
        return self.top if 0 < self.top < classes else classes

    def names(self, classes: int) -> tuple[str, ...]:
        """Names of the arrays that carry the rows."""
        return ("values",) if self.width(classes) == classes else ("values", "classes")


def encode_soft_outputs(
    probabilities: NDArray[np.float32], form: SoftForm
) -> dict[str, NDArray[Any]]:
    """Rows of probabilities [rows, classes] as ``values`` [rows, width] in the form's precision.

    Where classes are left out, ``classes`` uint16 [rows, width] says which were kept, increasing.
    Raises ValueError where a row is no distribution.
    """
    _require_distributions(probabilities)
    classes = probabilities.shape[1]
    width = form.width(classes)
    kept, arrays = probabilities, dict[str, NDArray[Any]]()
    if width < classes:
        # Stable, so that of equal probabilities the first classes are sent, everywhere.
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :width]
        chosen = np.sort(best, axis=1)
        kept = np.take_along_axis(probabilities, chosen, axis=1)
        arrays["classes"] = chosen.astype(np.uint16)
    if form.precision == "int8":
        # Even where all classes are sent one more share takes what rounding would create or lose.
        arrays["values"] = _in_steps(kept)
    else:
        arrays["values"] = kept.astype(_DTYPES[form.precision])
    return arrays


def decode_soft_outputs(
    arrays: Mapping[str, NDArray[Any]], rows: int, classes: int, form: SoftForm
) -> NDArray[np.float32]:
    """What :func:`encode_soft_outputs` was given, rounded: float32 [rows, classes], rows sum to 1.

    Reads no arrays but those of ``form.names``. Total: raises ValueError, whatever the arrays hold.
    """
    width = form.width(classes)
    values = _array(arrays, "values", _DTYPES[form.precision], (rows, width))
    if form.precision == "int8":
        found = values.astype(np.float32) / np.float32(_STEPS)
    else:
        found = values.astype(np.float32)
        # NaN fails the comparisons.
        if found.size and not (float(found.min()) >= 0 and float(found.max()) <= 1):
            raise ValueError("a probability is below 0, above 1 or no number")
    sums = found.sum(axis=1, dtype=np.float64)
    if width == classes:
        if not (np.abs(sums - 1) <= _SUM_SLACK).all():
            raise ValueError("the probabilities of a row do not add up to 1")
        return _normalised(found.astype(np.float64))
    if not (sums <= 1 + _SUM_SLACK).all():
        raise ValueError("the probabilities of a row add up to more than 1")
    chosen = _array(arrays, "classes", np.uint16, (rows, width)).astype(np.int64)
    if chosen.size and (int(chosen.max()) >= classes or (np.diff(chosen, axis=1) <= 0).any()):
        raise ValueError(f"a row's classes must increase from 0 to {classes - 1}")
    rest = np.maximum(0, 1 - sums) / (classes - width)
    whole = np.repeat(rest[:, None], classes, axis=1)
    np.put_along_axis(whole, chosen, found.astype(np.float64), axis=1)
    return _normalised(whole)


def _normalised(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    shares: NDArray[np.float32] = (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def _in_steps(kept: NDArray[np.float32]) -> NDArray[np.uint8]:
    """255ths by largest remainder: each row, with what is left out, adds up to 255."""
    rest = np.maximum(0, 1 - kept.sum(axis=1, dtype=np.float64, keepdims=True))
    shares = np.concatenate([kept.astype(np.float64), rest], axis=1)
    shares *= _STEPS / shares.sum(axis=1, keepdims=True)
    whole = np.floor(shares)
    missing = _STEPS - whole.sum(axis=1).astype(np.int64)
    order = np.argsort(whole - shares, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    whole += place < missing[:, None]
    steps: NDArray[np.uint8] = whole[:, :-1].astype(np.uint8)
    return steps


def _require_distributions(probabilities: NDArray[np.float32]) -> None:
    if probabilities.dtype != np.float32 or probabilities.ndim != 2:
        raise ValueError(
            f"soft outputs are {probabilities.dtype} {probabilities.shape}; expected float32 "
            "[rows, classes]"
        )
    if not 2 <= probabilities.shape[1] <= MOST_CLASSES:
        raise ValueError(f"{probabilities.shape[1]} classes; expected 2 to {MOST_CLASSES:,}")
    sums = probabilities.sum(axis=1, dtype=np.float64)
    # NaN fails the comparisons.
    if not (np.abs(sums - 1) <= 1e-3).all() or not (probabilities >= 0).all():
        raise ValueError("a row of soft outputs is no distribution: it must be >= 0 and sum to 1")


def _array(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: type, shape: tuple[int, int]
) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{name!r} is {found}; expected {np.dtype(dtype)} {shape}")
    return array


TeacherWeights = Literal["devices", "samples"]


@dataclass(frozen=True, slots=True)
class TeacherLogitsTraining(TrainingSettings):
    """How every device trains and what it sends in a round of teacher-logit aggregation.

    Attributes:
        classes: number of labels, 2 to 4,096: the model's outputs.
        epochs, batch_size, most_steps: local passes a round, samples a step, and the most steps a
            round (0 for no limit).
        learning_rate: replaces the artifact's ``lr``; 0 leaves the artifact's own.
        alpha, beta: weights of the student's own loss and of the teacher's (AFD, equation 3).
        divergence: whether KL(student || teacher) takes part, with weight 1 - alpha - beta. Off,
            and ``l2`` 0, is plain federated distillation.
        l2: lambda, the weight of half the squared norm of all parameters.
        weights: whether a teacher is the mean over the other devices, or over their samples.
        normalise: off divides the others' sum by the number of all devices, as AFD's equation 6
            does, and leaves the teacher below a distribution.
        blend_teacher: a device sends the mean of its own knowledge and its teacher's (AFD, equation
            5, halved so that it stays a distribution).
        least_teacher: teachers are clipped to at least this and, if ``normalise``, renormalised.
        precision, top_classes: how knowledge travels; see
            :class:`~device_sdk.methods.teacher_logits.contract.SoftForm`.
        least_confidence, most_confidence: what a device claims for the label itself is held within
            these bounds, its other classes scaled to match; 0 and 1 leave all as it is. A least
            confidence of 1 / classes takes a device that sends noise for no better than ignorant.
        most_samples: a device's claim of samples of one label counts up to this many.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    classes: Annotated[int, Within(2, MOST_CLASSES)]
    epochs: Annotated[int, Within(1, 1000)] = 1
    batch_size: Annotated[int, Within(1, 1_000_000)] = 64
    most_steps: Annotated[int, Within(0, 1_000_000_000)] = 0
    learning_rate: Annotated[float, Within(0, 1e3)] = 0.0
    alpha: Annotated[float, Within(0, 1)] = 0.6
    beta: Annotated[float, Within(0, 1)] = 0.2
    divergence: bool = True
    l2: Annotated[float, Within(0, 1e3)] = 0.0
    weights: TeacherWeights = "devices"
    normalise: bool = True
    blend_teacher: bool = False
    least_teacher: Annotated[float, Within(0, 0.5, above=True)] = 1e-4
    precision: Precision = "float16"
    top_classes: Annotated[int, Within(0, MOST_CLASSES)] = 0
    least_confidence: Annotated[float, Within(0, 1)] = 0.0
    most_confidence: Annotated[float, Within(0, 1)] = 1.0
    most_samples: Annotated[int, Within(1, 2**31 - 1)] = 10_000

    def check(self) -> None:
        """Raises ValueError for settings that do not go together."""
        if self.least_teacher > 1 / self.classes:
            raise ValueError(
                f"least_teacher is {self.least_teacher}; expected at most {1 / self.classes:g}, a "
                "class's even share"
            )
        if self.alpha + self.beta > 1 + 1e-9:
            raise ValueError(
                f"alpha + beta is {self.alpha + self.beta:g}; expected at most 1, since the "
                "divergence takes what is left"
            )
        if self.least_confidence > self.most_confidence:
            raise ValueError(
                f"least_confidence {self.least_confidence} exceeds most_confidence "
                f"{self.most_confidence}"
            )

    @property
    def gamma(self) -> float:
        """Weight of the divergence."""
        return max(0.0, 1 - self.alpha - self.beta) if self.divergence else 0.0

    @property
    def form(self) -> SoftForm:
        """How knowledge travels."""
        return SoftForm(self.precision, self.top_classes)


# What one device knows about each label, and what of it enters the aggregator's sums.
#
# Both ends compute :func:`share_of` from the same decoded arrays: a device can subtract from a
# sum exactly what the aggregator added for it.


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
    return {**encode_labels(knowledge), **encode_soft_outputs(knowledge.means, training.form)}


def decode_knowledge(
    tensors: Mapping[str, NDArray[Any]], training: TeacherLogitsTraining
) -> LabelKnowledge:
    """What :func:`encode_knowledge` was given, rounded.

    Total: raises ValueError for other names, dtypes, shapes or ranges, whatever the arrays hold.
    """
    names = training.form.names(training.classes)
    rows, counts = decode_labels(tensors, training.classes, names)
    means = decode_soft_outputs(tensors, len(rows), training.classes, training.form)
    return LabelKnowledge(rows, counts, means)


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
