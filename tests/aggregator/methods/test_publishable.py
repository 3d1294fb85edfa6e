"""Whatever a method takes of one device, the next broadcast can be carried by every codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.method import Refused
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.artifact.flat_layout import FlatLadder, flat_layout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, encode_knowledge
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.tensors import Codec, encode_tensors, require_encodable

LAYOUT = flat_layout({"a.weight": (40, 30), "a.bias": (40,), "b.weight": (4, 40)})


def publish(broadcast: Broadcast) -> None:
    for codec in Codec:
        for tensors in (broadcast.tensors, *(a.tensors for a in broadcast.attachments.values())):
            require_encodable(tensors)
            encode_tensors(tensors, codec, np.random.default_rng(0))


@pytest.mark.parametrize("spread", [False, True])
def test_attention_hands_on_the_largest_vectors_that_it_takes(spread: bool) -> None:
    training = AttentionTraining(aggregator_mixes=False, warm_up_rounds=1, sketch_rows=8)
    settings = AttentionSettings(training=training)
    one = AttentionMethod(np.zeros(LAYOUT.size, np.float32), FlatLadder((LAYOUT,)), settings)
    rng = np.random.default_rng(0)
    for number in range(1, 5):
        publish(one.open_round(number))
        for place in range(4):
            values = rng.standard_normal(LAYOUT.size).astype(np.float32)
            if place == 0:
                values[:] = 9e11 * (np.sign(values) if spread else 1)
            told = {"samples": 10, "mixture": place == 1, "loss": 1.5}
            each = Update(number, {"vector": values}, told, sender=f"{place + 1:032x}")
            one.check(each)
            one.absorb(each)
        one.close_round()
    publish(one.open_round(5))


@pytest.mark.parametrize("count", [10_000, 2**31 - 1])
def test_teachers_of_a_large_fleet_stay_means(count: int) -> None:
    training = TeacherLogitsTraining(classes=2, weights="samples", most_samples=2**31 - 1)
    one = TeacherLogitsMethod(training)
    one.open_round(1)
    means = np.asarray([[0.9, 0.1], [0.2, 0.8]], dtype=np.float32)
    knowledge = LabelKnowledge(np.arange(2), np.full(2, count), means)
    for _ in range(20):
        each = Update(1, encode_knowledge(knowledge, training))
        one.check(each)
        one.absorb(each)
    one.close_round()
    opened = one.open_round(2)
    publish(opened)
    np.testing.assert_allclose(opened.tensors["means"], means, atol=1e-3)


@pytest.mark.parametrize("trained", [False, True])
def test_the_largest_prototypes_that_are_taken_can_be_handed_on(trained: bool) -> None:
    settings = PrototypesSettings(PrototypesTraining(2, width=3), trained=trained)
    one = PrototypesMethod(settings, np.random.default_rng(0))
    means = np.asarray([[9e11, -9e11, 9e11], [9e11, 9e11, 9e11]], dtype=np.float32)
    for number in (1, 2):
        publish(one.open_round(number))
        for count in (1, 2**31 - 1):
            knowledge = LabelKnowledge(np.arange(2), np.full(2, count), means)
            each = Update(number, encode_prototypes(knowledge), sender=f"{count:032x}")
            one.check(each)
            one.absorb(each)
        one.close_round()
    publish(one.open_round(3))


def sharing(form: Any, value: float) -> Update:
    values = np.asarray([[0.0, 1.0], [value, 0.0]], dtype=np.float32)
    coded = encode_samples({"x": values, "y": np.asarray([0, 1])}, form)
    soft = encode_soft_labels(np.full((2, 2), 0.5, np.float32), "float16")
    tensors = {**soft, **{f"public.{name}": array for name, array in coded.items()}}
    return Update(1, tensors, {"mark": samples_mark(coded)}, "a" * 32)


@pytest.mark.parametrize("form", ["uint8", "deflate", "float32"])
def test_public_samples_that_not_every_codec_carries_are_refused(form: str) -> None:
    entries = {"x": SampleEntry("float32", (2,)), "y": SampleEntry("int64", ())}
    told = MutualTraining(2, sample_form=form)  # type: ignore[arg-type]
    one = MutualMethod(entries, MutualSettings(told))
    one.open_round(1)
    for value in (-9.5e11, 9.5e11 if form == "float32" else 2e14):
        with pytest.raises(Refused) as refused:
            one.check(sharing(form, value))
        assert refused.value.reason == "bad-public"
    one.check(sharing(form, 101_325.0))
    one.absorb(sharing(form, 101_325.0))
    one.close_round()
    publish(one.open_round(2))
