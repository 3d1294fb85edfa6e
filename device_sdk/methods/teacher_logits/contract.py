"""The training settings that a teacher-logits broadcast carries, known to both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from device_sdk.methods.settings import (
    TrainingSettings,
    require_choice,
    require_flags,
    require_number,
    require_whole,
)
from device_sdk.methods.teacher_logits.soft_outputs import MOST_CLASSES, Precision, SoftForm

__all__ = ["TeacherLogitsTraining", "TeacherWeights"]

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
            :class:`~device_sdk.methods.teacher_logits.soft_outputs.SoftForm`.
        least_confidence, most_confidence: what a device claims for the label itself is held within
            these bounds, its other classes scaled to match; 0 and 1 leave all as it is. A least
            confidence of 1 / classes takes a device that sends noise for no better than ignorant.
        most_samples: a device's claim of samples of one label counts up to this many.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    classes: int
    epochs: int = 1
    batch_size: int = 64
    most_steps: int = 0
    learning_rate: float = 0.0
    alpha: float = 0.6
    beta: float = 0.2
    divergence: bool = True
    l2: float = 0.0
    weights: TeacherWeights = "devices"
    normalise: bool = True
    blend_teacher: bool = False
    least_teacher: float = 1e-4
    precision: Precision = "float16"
    top_classes: int = 0
    least_confidence: float = 0.0
    most_confidence: float = 1.0
    most_samples: int = 10_000

    def __post_init__(self) -> None:
        require_whole("classes", self.classes, 2, MOST_CLASSES)
        require_whole("epochs", self.epochs, 1, 1000)
        require_whole("batch_size", self.batch_size, 1, 1_000_000)
        require_whole("most_steps", self.most_steps, 0, 1_000_000_000)
        require_whole("most_samples", self.most_samples, 1, 2**31 - 1)
        require_whole("top_classes", self.top_classes, 0, MOST_CLASSES)
        for name, most in (
            ("learning_rate", 1e3),
            ("alpha", 1.0),
            ("beta", 1.0),
            ("l2", 1e3),
            ("least_confidence", 1.0),
            ("most_confidence", 1.0),
            ("least_teacher", 1 / self.classes),
        ):
            require_number(name, getattr(self, name), 0, most)
        require_flags(self, ("divergence", "normalise", "blend_teacher"))
        if self.least_teacher == 0:
            raise ValueError("least_teacher is 0; expected above 0, since its logarithm is taken")
        if self.alpha + self.beta > 1 + 1e-9:
            raise ValueError(
                f"alpha + beta is {self.alpha + self.beta:g}; expected at most 1, since the "
                "divergence takes what is left"
            )
        require_choice("weights", self.weights, get_args(TeacherWeights))
        if self.least_confidence > self.most_confidence:
            raise ValueError(
                f"least_confidence {self.least_confidence} exceeds most_confidence "
                f"{self.most_confidence}"
            )
        SoftForm(self.precision, self.top_classes)

    @property
    def gamma(self) -> float:
        """Weight of the divergence."""
        return max(0.0, 1 - self.alpha - self.beta) if self.divergence else 0.0

    @property
    def form(self) -> SoftForm:
        """How knowledge travels."""
        return SoftForm(self.precision, self.top_classes)
