"""The table ``[teacher_logits]`` of a task file: what devices predict, label by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.methods.binding import ArrayBinding, read_settings
from aggregator.methods.teacher_logits.method import TeacherLogitsMethod
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining

_COUNTS = "label_counts"


@dataclass(frozen=True, slots=True)
class TeacherLogitsSettings:
    """Settings of a task of teacher-logit aggregation; see :class:`TeacherLogitsMethod`."""

    training: TeacherLogitsTraining
    rate_decay: float = 1.0


def read_teacher_logits(table: TomlTable) -> ArrayBinding[TeacherLogitsSettings]:
    """Read the table. Raises TaskError, naming the key."""
    settings = read_settings(TeacherLogitsSettings, table)
    return ArrayBinding("teacher_logits", settings, _method)


def _method(artifacts: Sequence[Artifact], settings: TeacherLogitsSettings) -> TeacherLogitsMethod:
    # Models of any kind, for none of them is shared; but all must know the same classes.
    for artifact in artifacts:
        name = artifact.manifest.name
        ports = artifact.manifest.graphs["train"].select("output")
        shapes = [port.shape for port in ports if port.of == _COUNTS]
        if not shapes:
            raise ValueError(
                f"artifact {name!r} gives no {_COUNTS}: export it with export.losses's loss"
            )
        if shapes[0] != (settings.training.classes,):
            raise ValueError(
                f"artifact {name!r} knows {shapes[0]} classes, the task {settings.training.classes}"
            )
    return TeacherLogitsMethod(settings.training, settings.rate_decay)
