"""The table ``[teacher_logits]`` of a task file: what devices predict, label by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aggregator.methods.binding import Binding
from aggregator.methods.falling_rate import RateDecay
from aggregator.methods.teacher_logits.method import TeacherLogitsMethod
from device_sdk.artifact import Artifact
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

_COUNTS = "label_counts"


@dataclass(frozen=True, slots=True)
class TeacherLogitsSettings:
    """Settings of a task of teacher-logit aggregation; see :class:`TeacherLogitsMethod`."""

    training: TeacherLogitsTraining
    rate_decay: RateDecay = 1.0


class TeacherLogitsBinding(Binding[TeacherLogitsSettings]):
    """Models of any kind, for none of them is shared; but all must know the same classes."""

    __slots__ = ()
    settings_class = TeacherLogitsSettings

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> TeacherLogitsMethod:
        """Nothing of the artifacts but what they tell of each label."""
        training = self.settings.training
        for artifact in artifacts:
            name = artifact.manifest.name
            ports = artifact.manifest.graphs["train"].select("output")
            shapes = [port.shape for port in ports if port.of == _COUNTS]
            if not shapes:
                raise ValueError(
                    f"artifact {name!r} gives no {_COUNTS}: export it with export.losses's loss"
                )
            if shapes[0] != (training.classes,):
                raise ValueError(
                    f"artifact {name!r} knows {shapes[0]} classes, the task {training.classes}"
                )
        return TeacherLogitsMethod(training, self.settings.rate_decay)
