from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.teacher_logits.contract import (
    Share,
    TeacherLogitsTraining,
    decode_knowledge,
    encode_knowledge,
    share_of,
)
from device_sdk.methods.teacher_logits.learner import SentShares, leave_one_out, summed_rounds
from device_sdk.wire.arrays.exchange import Broadcast, Update

Tensors = dict[str, np.ndarray[Any, Any]]


def random_knowledge(classes: int, rng: np.random.Generator) -> LabelKnowledge:
    labels = np.flatnonzero(rng.random(classes) < 0.7)
    means = rng.dirichlet(np.ones(classes), size=len(labels)).astype(np.float32)
    counts = rng.integers(1, 50, size=len(labels))
    return LabelKnowledge(labels, counts, means.reshape(len(labels), classes))


def after_a_round(
    sent: list[Tensors], training: TeacherLogitsTraining
) -> tuple[Broadcast, list[Share]]:
    """The next broadcast once all of these were absorbed, and each device's own share."""
    method = TeacherLogitsMethod(training)
    # What claims of samples count for is told each round.
    training = TeacherLogitsTraining.from_scalars(method.open_round(1).settings, LearnerError)
    for tensors in sent:
        update = Update(1, tensors)
        method.check(update)
        method.absorb(update)
    method.close_round()
    shares = [share_of(decode_knowledge(tensors, training), training) for tensors in sent]
    return method.open_round(2), shares


@given(
    devices=st.integers(1, 6),
    classes=st.integers(2, 5),
    precision=st.sampled_from(["float32", "float16", "int8"]),
    top=st.sampled_from([0, 2]),
    weights=st.sampled_from(["devices", "samples"]),
    least=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**20),
)
def test_a_teacher_is_the_mean_of_what_was_read_from_the_others(
    devices: int, classes: int, precision: Any, top: int, weights: Any, least: float, seed: int
) -> None:
    training = TeacherLogitsTraining(
        classes=classes,
        precision=precision,
        top_classes=top,
        weights=weights,
        least_confidence=least,
    )
    rng = np.random.default_rng(seed)
    sent = [encode_knowledge(random_knowledge(classes, rng), training) for _ in range(devices)]
    broadcast, shares = after_a_round(sent, training)
    for device, own in enumerate(shares):
        found = leave_one_out(broadcast, own, training)
        others = [share for place, share in enumerate(shares) if place != device]
        for label in range(classes):
            having = [share for share in others if share.devices[label]]
            assert found.taught[label] == bool(having)
            if not having:
                np.testing.assert_allclose(found.table[label], 1 / classes)
                continue
            total = np.sum([share.sums[label] for share in having], axis=0, dtype=np.float64)
            mean = np.maximum(total / sum(share.weights[label] for share in having), 1e-4)
            np.testing.assert_allclose(found.table[label], mean / mean.sum(), atol=2e-5)


def test_equation_6_divides_by_all_devices_and_stays_below_a_distribution() -> None:
    training = TeacherLogitsTraining(classes=2, normalise=False)
    rng = np.random.default_rng(1)
    labels, counts = np.arange(2), np.ones(2, dtype=np.int64)
    sent = [
        encode_knowledge(
            LabelKnowledge(labels, counts, rng.dirichlet([3, 3], size=2).astype(np.float32)),
            training,
        )
        for _ in range(4)
    ]
    broadcast, shares = after_a_round(sent, training)
    found = leave_one_out(broadcast, shares[0], training)
    np.testing.assert_allclose(found.table.sum(axis=1), 3 / 4, atol=1e-5)
    np.testing.assert_allclose(found.table, sum(s.sums for s in shares[1:]) / 4, atol=1e-5)


def test_before_the_first_round_nobody_teaches() -> None:
    training = TeacherLogitsTraining(classes=4)
    broadcast = TeacherLogitsMethod(training).open_round(1)
    assert not summed_rounds(broadcast)
    assert not leave_one_out(broadcast, None, training).taught.any()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("means", np.zeros((3, 3), dtype=np.float32)),
        ("means", np.zeros((2, 2), dtype=np.float16)),
        ("weights", np.full(2, -1, dtype=np.int64)),
        ("round", np.asarray(9, dtype=np.int64)),
        ("first_round", np.asarray(1, dtype=np.int64)),
        ("first_round", None),
        ("round", np.asarray([0], dtype=np.int64)),
        ("participants", None),
    ],
)
def test_broadcasts_that_do_not_fit_are_refused(name: str, array: Any) -> None:
    training = TeacherLogitsTraining(classes=2)
    opened = TeacherLogitsMethod(training).open_round(1)
    tensors = {key: value for key, value in opened.tensors.items() if key != name}
    if array is not None:
        tensors[name] = array
    broadcast = Broadcast(1, 0, tensors, opened.settings)
    with pytest.raises(LearnerError, match=r"broadcast"):
        summed_rounds(broadcast)
        leave_one_out(broadcast, None, training)


def share(value: float) -> Share:
    ones = np.ones(2, dtype=np.int64)
    return Share(np.full((2, 2), value, dtype=np.float32), ones, ones, 0)


def test_shares_count_once_a_receipt_says_so_and_old_ones_go() -> None:
    sent = SentShares().sent(4, share(0.4)).sent(5, share(0.5))
    assert sent.in_sums_of(range(4, 5)) is None
    sent = sent.receipted(4, True).receipted(77, True)
    found = sent.in_sums_of(range(3, 6))
    assert found is not None and found.sums[0, 0] == np.float32(0.4)
    assert sent.receipted(4, False).in_sums_of(range(4, 5)) is None
    assert [one.round_id for one in sent.at(range(5, 6)).shares] == [5]
    for round_id in range(6, 40):
        sent = sent.sent(round_id, share(0.1))
    assert len(sent.shares) == 8


def test_shares_that_wait_for_one_version_are_added_up() -> None:
    sent = SentShares().sent(3, share(0.3)).receipted(3, True)
    for round_id in range(4, 40):  # none of which reaches its quorum
        sent = sent.at(range(3, 4)).sent(round_id, share(1.0)).receipted(round_id, round_id != 20)
        assert len(sent.shares) <= 4
    found = [sent.in_sums_of(rounds) for rounds in (range(3, 4), range(4, 40), range(40, 41))]
    assert found[0] is not None and found[0].devices.tolist() == [1, 1]
    assert found[1] is not None and found[1].devices.tolist() == [35, 35]
    np.testing.assert_array_equal(found[1].sums, np.full((2, 2), 35))
    assert found[2] is None


def test_shares_survive_a_restart() -> None:
    sent = SentShares().sent(4, share(0.4)).receipted(4, True).sent(5, share(0.5))
    back = SentShares.from_state(sent.state())
    assert back.in_sums_of(range(4, 5)) is not None and back.in_sums_of(range(5, 6)) is None
    for name, array in sent.state().items():
        np.testing.assert_array_equal(back.state()[name], array)
        with pytest.raises(LearnerError):
            SentShares.from_state({**sent.state(), name: array.astype(np.float64)})
    assert SentShares.from_state(SentShares().state()).shares == ()
