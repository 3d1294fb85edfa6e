from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.wire.arrays.exchange import Update

TRAINING = TeacherLogitsTraining(classes=3, least_confidence=0.2)


def test_the_rate_falls_round_by_round() -> None:
    method = TeacherLogitsMethod(replace(TRAINING, learning_rate=0.1), rate_decay=0.5)
    rates = [method.open_round(number).settings["learning_rate"] for number in (1, 2, 4, 400)]
    assert rates == pytest.approx([0.1, 0.05, 0.0125, 1e-9])
    steady = TeacherLogitsMethod(TRAINING)
    assert [steady.open_round(n).settings["learning_rate"] for n in (1, 2)] == [0, 0]
    with pytest.raises(ValueError, match="rate_decay is 0"):
        TeacherLogitsMethod(replace(TRAINING, learning_rate=0.1), rate_decay=0)
    with pytest.raises(ValueError, match="needs a learning_rate"):
        TeacherLogitsMethod(TRAINING, rate_decay=0.5)


def test_the_round_says_how_sure_devices_are_and_what_was_bounded() -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    labels, counts = np.array([0, 1]), np.array([5, 5])
    means = np.array([[0.6, 0.2, 0.2], [0.95, 0.05, 0.0]], dtype=np.float32)
    method.absorb(Update(1, encode_knowledge(LabelKnowledge(labels, counts, means), TRAINING)))
    metrics = method.close_round().metrics
    assert metrics["bounded"] == 1 and metrics["labels"] == 2
    assert metrics["confidence"] == pytest.approx((0.6 + 0.2) / 2, abs=1e-3)
