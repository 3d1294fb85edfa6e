from __future__ import annotations

import math
from typing import Any

import pytest

from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining


def test_settings_travel_as_scalars_among_others() -> None:
    sent = TeacherLogitsTraining(classes=7, alpha=0.5, beta=0.25, weights="samples", top_classes=3)
    scalars = {**sent.as_scalars(), "of_another_part": 1}
    assert TeacherLogitsTraining.from_scalars(scalars) == sent
    del scalars["alpha"]
    with pytest.raises(ValueError, match="lacks the training settings alpha"):
        TeacherLogitsTraining.from_scalars(scalars)


def test_the_divergence_takes_what_the_two_losses_leave() -> None:
    assert TeacherLogitsTraining(2, alpha=0.5, beta=0.2).gamma == pytest.approx(0.3)
    assert TeacherLogitsTraining(2, alpha=0.5, beta=0.2, divergence=False).gamma == 0
    assert TeacherLogitsTraining(2, alpha=0.9, beta=0.1).gamma == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", 1),
        ("classes", 2.0),
        ("classes", 5000),
        ("epochs", 0),
        ("batch_size", True),
        ("most_steps", -1),
        ("learning_rate", math.nan),
        ("learning_rate", -1.0),
        ("alpha", 1.5),
        ("beta", 0.6),  # with alpha's default the sum exceeds 1
        ("divergence", 1),
        ("l2", -1.0),
        ("weights", "labels"),
        ("normalise", "no"),
        ("least_teacher", 0.0),
        ("least_teacher", 0.6),
        ("precision", "fp16"),
        ("top_classes", -1),
        ("least_confidence", 1.1),
        ("most_confidence", -0.1),
        ("most_samples", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}|alpha \\+ beta"):
        TeacherLogitsTraining(**{"classes": 2, name: value})


def test_confidence_bounds_must_not_cross() -> None:
    with pytest.raises(ValueError, match="exceeds most_confidence"):
        TeacherLogitsTraining(2, least_confidence=0.9, most_confidence=0.5)
