from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aggregator.methods.method import Refused
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.methods.state import RestoreError
from device_sdk.methods.teacher_logits.contract import (
    LabelKnowledge,
    TeacherLogitsTraining,
    encode_knowledge,
)
from device_sdk.wire.arrays.exchange import Update

TRAINING = TeacherLogitsTraining(classes=3, least_confidence=0.2)


def update(seed: int, round_id: int = 1) -> Update:
    rng = np.random.default_rng(seed)
    labels = np.flatnonzero(rng.random(3) < 0.7)
    means = rng.dirichlet(np.ones(3), size=len(labels)).astype(np.float32).reshape(-1, 3)
    counts = rng.integers(1, 9, size=len(labels))
    return Update(round_id, encode_knowledge(LabelKnowledge(labels, counts, means), TRAINING))


def state_bytes(method: TeacherLogitsMethod) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in method.state().items()}


def test_a_round_without_updates_leaves_the_sums_and_the_version() -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    method.absorb(update(0))
    first = method.close_round()
    assert (first.version, first.participants) == (1, 1)
    before = method.knowledge
    method.open_round(2)
    second = method.close_round()
    assert (second.version, second.participants) == (1, 0)
    np.testing.assert_array_equal(method.knowledge, before)
    assert int(method.open_round(3).tensors["round"]) == 1


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


def test_a_round_that_is_given_up_is_forgotten() -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    method.absorb(update(0))
    method.open_round(2)
    assert method.close_round().participants == 0
    with pytest.raises(ValueError, match="does not follow"):
        method.open_round(2)


def test_the_round_says_how_sure_devices_are_and_what_was_bounded() -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    labels, counts = np.array([0, 1]), np.array([5, 5])
    means = np.array([[0.6, 0.2, 0.2], [0.95, 0.05, 0.0]], dtype=np.float32)
    method.absorb(Update(1, encode_knowledge(LabelKnowledge(labels, counts, means), TRAINING)))
    metrics = method.close_round().metrics
    assert metrics["bounded"] == 1 and metrics["labels"] == 2
    assert metrics["confidence"] == pytest.approx((0.6 + 0.2) / 2, abs=1e-3)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_method_restored_mid_round_continues_bit_for_bit(cut: int) -> None:
    # Round 2 missed its quorum: round 3 begins with what counted in it.
    updates = [update(0, round_id=2), *(update(seed, round_id=3) for seed in range(1, 4))]
    whole, first = TeacherLogitsMethod(TRAINING), TeacherLogitsMethod(TRAINING)
    for method in (whole, first):
        method.open_round(1)
        method.absorb(update(9))
        method.close_round()
        method.open_round(3)
    for one in updates[:cut]:
        first.absorb(one)
    second = TeacherLogitsMethod(TRAINING)
    second.restore(first.state())
    for one in updates[cut:]:
        second.absorb(one)
    for one in updates:
        whole.absorb(one)
    assert second.close_round() == whole.close_round()
    assert state_bytes(second) == state_bytes(whole)
    told = second.open_round(4).tensors
    assert (int(told["first_round"]), int(told["round"])) == (2, 3)


@given(
    st.dictionaries(
        st.sampled_from(["labels", "counts", "values", "more"]),
        hnp.arrays(
            st.sampled_from([np.uint16, np.int32, np.float16, np.float32]),
            hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
            elements={"allow_nan": False, "allow_infinity": False},
        ),
        min_size=2,
    )
)
def test_check_is_pure_and_total_and_absorb_takes_what_it_passes(
    tensors: dict[str, NDArray[Any]],
) -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    before = state_bytes(method)
    try:
        method.check(Update(1, tensors))
    except Refused:
        assert state_bytes(method) == before
        return
    assert state_bytes(method) == before
    method.absorb(Update(1, tensors))
    assert method.close_round().participants == 1


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Update(2, update(0).tensors), "bad-round"),
        (Update(1, update(0).tensors, {"loss": 1.0}), "bad-metadata"),
        (Update(1, {}), "bad-tensors"),
    ],
)
def test_refusals_have_reasons(broken: Update, reason: str) -> None:
    method = TeacherLogitsMethod(TRAINING)
    method.open_round(1)
    with pytest.raises(Refused) as caught:
        method.check(broken)
    assert caught.value.reason == reason


def test_before_the_first_round_everything_is_refused() -> None:
    with pytest.raises(Refused, match="round"):
        TeacherLogitsMethod(TRAINING).check(update(0, round_id=0))


def test_states_that_do_not_fit_change_nothing() -> None:
    method = TeacherLogitsMethod(TRAINING)
    good = method.state()
    own = {name: array for name, array in good.items() if "." not in name}
    for name, array in own.items():
        for bad in (array.astype(np.float16), np.zeros((2, 2, 2), array.dtype)):
            with pytest.raises(RestoreError, match=name):
                method.restore({**good, name: bad})
    with pytest.raises(RestoreError, match="not finite"):
        method.restore({**good, "sums": np.full((3, 3), np.nan)})
    with pytest.raises(RestoreError, match="expected"):
        method.restore({"sums": good["sums"]})
    assert state_bytes(method) == {name: array.tobytes() for name, array in good.items()}
