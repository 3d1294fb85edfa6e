from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.method import Refused
from aggregator.methods.mutual import MutualMethod, MutualSettings
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.wire.arrays.exchange import Broadcast, Update

CLASSES = 3
ENTRIES = {"x": SampleEntry("float32", (2,)), "y": SampleEntry("int64", ())}
TRAINING = MutualTraining(CLASSES)
A, B, C = (digit * 32 for digit in "abc")


def method(**changes: object) -> MutualMethod:
    return MutualMethod(ENTRIES, MutualSettings(TRAINING, **changes))  # type: ignore[arg-type]


def meaned() -> MutualMethod:
    return MutualMethod(ENTRIES, MutualSettings(replace(TRAINING, combine="mean")))


def labels(count: int, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).random((count, CLASSES)).astype(np.float32) + 0.1
    return encode_soft_labels(raw / raw.sum(1, keepdims=True), "float16")["labels"]


def update(
    sender: str, count: int = 4, round_id: int = 1, *, public: bool = True, seed: int = 0
) -> Update:
    tensors = {"labels": labels(count, seed)}
    metadata: dict[str, float | str] = {"local_loss": 1.5}
    if public:
        rng = np.random.default_rng(seed)
        coded = encode_samples(
            {
                "x": rng.standard_normal((count, 2)).astype(np.float32),
                "y": rng.integers(0, CLASSES, count),
            },
            "uint8",
        )
        tensors |= {f"public.{name}": array for name, array in coded.items()}
        metadata["mark"] = samples_mark(coded)
    return Update(round_id, tensors, metadata, sender)


def run(one: MutualMethod, round_id: int, *updates: Update) -> Broadcast:
    """One round, and the next one's broadcast."""
    if round_id == 1:
        one.open_round(1)
    for each in updates:
        one.check(each)
        one.absorb(each)
    one.close_round()
    return one.open_round(round_id + 1)


def test_samples_are_attached_and_labels_relayed() -> None:
    one = method()
    first = update(A)
    sent = run(one, 1, first, update(B, 5))
    assert {name.split(".")[1] for name in sent.attachments} == {A, B}
    assert f"public.{A}.{first.metadata['mark']}" in sent.attachments
    assert set(sent.tensors) == {f"labels.{A}", f"labels.{B}"}
    np.testing.assert_array_equal(sent.tensors[f"labels.{A}"], first.tensors["labels"])
    attached = sent.attachments[f"public.{A}.{first.metadata['mark']}"]
    np.testing.assert_array_equal(attached.tensors["x"], first.tensors["public.x"])
    assert attached.cohort == ""


@pytest.mark.parametrize(("stale_rounds", "kept"), [(0, 0), (1, 1), (3, 3)])
def test_labels_of_the_missing_are_relayed_up_to_their_age(stale_rounds: int, kept: int) -> None:
    one = method(stale_rounds=stale_rounds)
    run(one, 1, update(A), update(B))
    seen = 0
    for round_id in range(2, 7):
        sent = run(one, round_id, update(A, round_id=round_id, public=False))
        seen += f"labels.{B}" in sent.tensors
        assert f"labels.{A}" in sent.tensors and len(sent.attachments) == 2
    assert seen == kept


def test_a_round_that_nobody_answered_ages_nothing() -> None:
    one = method()
    run(one, 1, update(A))
    assert one.close_round().version == 1
    assert f"labels.{A}" in one.open_round(3).tensors


def test_means_are_over_devices_and_by_owner() -> None:
    one = meaned()
    run(one, 1, update_without_labels(A), update_without_labels(B, 3))
    thoughts = {
        sender: {f"labels.{A}": labels(4, seed), f"labels.{B}": labels(3, seed)}
        for seed, sender in ((1, A), (2, B), (3, C))
    }
    answers = [Update(2, tensors, {"local_loss": 1.0}, who) for who, tensors in thoughts.items()]
    sent = run(one, 2, *answers)
    expected = np.mean([tensors[f"labels.{B}"].astype(float) for tensors in thoughts.values()], 0)
    np.testing.assert_allclose(sent.tensors[f"labels.{B}"], expected, atol=2e-3)


def update_without_labels(sender: str, count: int = 4) -> Update:
    whole = update(sender, count)
    tensors = {name: array for name, array in whole.tensors.items() if name != "labels"}
    return Update(1, tensors, whole.metadata, sender)


def test_new_samples_replace_the_old_and_what_was_said_about_them() -> None:
    one = method(stale_rounds=9)
    run(one, 1, update(A), update(B))
    changed = update(A, 6, 2, seed=5)
    sent = run(one, 2, changed)
    assert f"public.{A}.{changed.metadata['mark']}" in sent.attachments
    assert len(sent.attachments) == 2 and len(sent.tensors[f"labels.{A}"]) == 6
    one.forget(B)
    one.close_round()
    left = one.open_round(4)
    assert [name.split(".")[1] for name in left.attachments] == [A]
    assert set(left.tensors) == {f"labels.{A}"}


def test_labels_of_two_rounds_carried_over_are_about_the_samples_that_stay() -> None:
    one = method()
    run(one, 1, update(A), update(B))
    grown = update(A, 6, 2, seed=5)
    one.check(grown)
    # The quorum was missed: the next round begins with what was counted. In it the device speaks
    # of the four samples that the others still know, and not of the six that replace them.
    one.open_round(3)
    one.absorb(grown)
    again = update(A, round_id=3, public=False)
    one.check(again)
    one.absorb(again)
    one.close_round()
    sent = one.open_round(4)
    np.testing.assert_array_equal(sent.tensors[f"labels.{A}"], grown.tensors["labels"])
    attached = sent.attachments[f"public.{A}.{grown.metadata['mark']}"]
    assert len(attached.tensors["y"]) == len(sent.tensors[f"labels.{A}"]) == 6


def test_confidence_and_metrics_are_reported() -> None:
    one = method()
    one.open_round(1)
    each = update(A, 9)
    one.check(each)
    one.absorb(each)
    metrics = one.close_round().metrics
    right = each.tensors["labels"].argmax(1) == each.tensors["public.y"]
    assert metrics["confidence"] == pytest.approx(float(right.mean()))
    assert metrics["local_loss"] == 1.5 and metrics["owners"] == 1


def changed(**parts: object) -> Update:
    good = update(A)
    fields = {"round_id": 1, "tensors": good.tensors, "metadata": good.metadata, "sender": A}
    return Update(**{**fields, **parts})  # type: ignore[arg-type]


def tensors(**parts: np.ndarray | None) -> dict[str, np.ndarray]:
    found = {**update(A).tensors, **{n.replace("__", "."): a for n, a in parts.items()}}
    return {name: array for name, array in found.items() if array is not None}


MARK = update(A).metadata["mark"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (changed(round_id=2), "bad-round"),
        (changed(sender=""), "bad-sender"),
        (changed(metadata={"mark": "zz"}), "bad-metadata"),
        (changed(metadata={}), "bad-metadata"),
        (changed(metadata={"mark": MARK, "age": 3}), "bad-metadata"),
        (changed(metadata={"mark": MARK, "local_loss": "low"}), "bad-metadata"),
        (changed(tensors=tensors(labels=None)), "bad-labels"),
        (changed(tensors=tensors(labels=labels(3))), "bad-labels"),
        (changed(tensors=tensors(labels=labels(4) * np.float16(2))), "bad-labels"),
        (changed(tensors=tensors(labels=labels(4) * np.float16(np.nan))), "bad-labels"),
        (changed(tensors=tensors(more=labels(4))), "bad-labels"),
        (changed(tensors=tensors(public__y=None)), "bad-public"),
        (changed(tensors=tensors(public__z=labels(4))), "bad-public"),
        (changed(tensors=tensors(public__y=np.full(4, 3, np.uint8))), "bad-public"),
        (changed(tensors=tensors(public__y=np.zeros(5, np.uint8))), "bad-public"),
        (changed(tensors=tensors(public__x=np.zeros((4, 3), np.uint8))), "bad-public"),
        (changed(tensors={"labels": labels(4)}, metadata={}), "bad-tensors"),
        (update(A, 2001), "too-many"),
    ],
)
def test_what_does_not_fit_is_refused_for_a_reason(bad: Update, reason: str) -> None:
    one = method()
    one.open_round(1)
    with pytest.raises(Refused) as refused:
        one.check(bad)
    assert refused.value.reason == reason


def test_no_more_than_so_many_may_share_but_all_may_learn() -> None:
    one = method(most_owners=1)
    run(one, 1, update(A))
    with pytest.raises(Refused, match="no further"):
        one.check(update(B, round_id=2))
    one.check(Update(2, {}, {"local_loss": 1.0}, B))
    one.check(update(A, 6, 2))


def test_newcomers_of_one_round_do_not_pass_the_limit_together() -> None:
    one = method(most_owners=2)
    one.open_round(1)
    first, second, third = (update(owner, 3 + at) for at, owner in enumerate((B, C, A)))
    for each in (first, second, third):
        one.check(each)  # a group is checked before any of it is absorbed
    for each in (first, second, third):
        one.absorb(each)
    with pytest.raises(Refused, match="no further"):
        one.check(update("d" * 32))
    assert one.close_round().participants == 3
    sent = one.open_round(2)
    assert one.owners == (B, C)
    assert set(sent.tensors) == {f"labels.{B}", f"labels.{C}"}


def test_thoughts_about_what_nobody_shares_are_refused() -> None:
    one = meaned()
    run(one, 1, update_without_labels(A))
    for bad in (
        {f"labels.{B}": labels(4)},
        {f"labels.{A}": labels(5)},
        {f"classes.{A}": labels(4)},
    ):
        with pytest.raises(Refused):
            one.check(Update(2, bad, {}, B))
    one.check(Update(2, {}, {}, B))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 1}, "classes is 1"),
        ({"combine": "sum"}, "combine"),
        ({"schedule": "never"}, "schedule"),
        ({"label_form": "float64"}, "label_form"),
        ({"local_steps": 0}, "local_steps"),
        ({"weight_kl": -1.0}, "weight_kl"),
        ({"least_confidence": 1.5}, "least_confidence"),
        ({"project": 1}, "project"),
        ({"target": ""}, "target"),
        ({"top_classes": 3}, "top_classes is 3 of 3"),
        ({"top_classes": 2, "combine": "mean"}, "combine='own'"),
        ({"per_teacher": True, "schedule": "joint"}, "per_teacher"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MutualTraining(**{"classes": CLASSES, **settings})  # type: ignore[arg-type]


def test_settings_travel_as_scalars() -> None:
    training = MutualTraining(7, schedule="joint", top_classes=2, label_form="uint8", project=False)
    assert MutualTraining.from_scalars({**training.as_scalars(), "other": 1}) == training
    with pytest.raises(ValueError, match="lacks the training settings"):
        MutualTraining.from_scalars({})
    # What was read before is read once; True is no 1 all the same.
    assert MutualTraining.from_scalars({**training.as_scalars(), "local_steps": 1}).local_steps == 1
    with pytest.raises(ValueError, match="local_steps"):
        MutualTraining.from_scalars({**training.as_scalars(), "local_steps": True})
    with pytest.raises(ValueError, match="stale_rounds"):
        MutualSettings(training, stale_rounds=-1)
    with pytest.raises(ValueError, match="one integer a sample"):
        MutualMethod({"x": ENTRIES["x"]}, MutualSettings(training))
