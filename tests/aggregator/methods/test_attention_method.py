from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.attention import (
    AttentionBinding,
    AttentionMethod,
    AttentionSettings,
    ClusterSettings,
    MixtureSettings,
    amp_weights,
    likeness_weights,
    sketch_weights,
)
from aggregator.methods.method import Refused
from device_sdk.artifact.flat_layout import FlatLadder, flat_layout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.wire.arrays.exchange import Broadcast, Update

NARROW = flat_layout({"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4, 2)})
WIDE = flat_layout({"a.weight": (5, 3), "a.bias": (5,), "b.weight": (4, 5)})
BOTH = FlatLadder((NARROW, WIDE))
TOLD = AttentionTraining(warm_up_rounds=1, sketch_rows=8, aggregator_mixes=False)
SETTINGS = AttentionSettings(training=TOLD, half=False)


def name(index: int) -> str:
    return f"{index + 1:032x}"


def vector(seed: int, size: int = NARROW.size) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def method(settings: AttentionSettings = SETTINGS, **changes: object) -> AttentionMethod:
    chosen = replace(settings, **changes)  # type: ignore[arg-type]
    return AttentionMethod(np.zeros(NARROW.size, np.float32), FlatLadder((NARROW,)), chosen)


def update(round_id: int, index: int, values: np.ndarray, **told: object) -> Update:
    metadata = {"samples": 10, "mixture": False, "loss": 1.5, **told}
    return Update(round_id, {"vector": values}, metadata, sender=name(index))  # type: ignore[arg-type]


def run_round(one: AttentionMethod, round_id: int, *updates: Update) -> None:
    one.open_round(round_id)
    for each in updates:
        one.check(each)
        one.absorb(each)
    one.close_round()


def test_the_global_model_is_the_mean_weighted_by_samples() -> None:
    one = method()
    run_round(one, 1, update(1, 0, vector(0), samples=30), update(1, 1, vector(1), samples=10))
    np.testing.assert_allclose(one.shared, 0.75 * vector(0) + 0.25 * vector(1), rtol=1e-6)


def test_widths_overlap_on_the_common_block() -> None:
    start = vector(9, WIDE.size)
    one = AttentionMethod(start, BOTH, SETTINGS)
    narrow, wide = vector(0), vector(1, WIDE.size)
    run_round(one, 1, update(1, 0, narrow, rung=1), update(1, 1, wide, rung=2))
    places = BOTH.places(NARROW)
    expected = wide.copy()
    expected[places] = (narrow + wide[places]) / 2
    np.testing.assert_allclose(one.shared, expected, rtol=1e-6)
    run_round(one, 2, update(2, 0, narrow, rung=1))
    kept = np.setdiff1d(np.arange(WIDE.size), places)
    np.testing.assert_allclose(one.shared[kept], wide[kept], rtol=1e-6)
    np.testing.assert_allclose(one.shared[places], narrow, rtol=1e-6)


def test_a_rung_has_its_number_where_the_task_leaves_others_out() -> None:
    binding = AttentionBinding("attention", SETTINGS)
    one = AttentionMethod(np.zeros(WIDE.size, np.float32), replace(BOTH, rungs=(1, 3)), SETTINGS)
    narrow, wide = vector(0), vector(1, WIDE.size)
    one.open_round(1)
    with pytest.raises(Refused, match="rung is none of the task's"):
        one.check(update(1, 1, wide, rung=2))
    sent = [update(1, 0, narrow, rung=1), update(1, 1, wide, rung=3)]
    assert [binding.width_of(each) for each in sent] == [1, 3]
    for each in sent:
        one.check(each)
        one.absorb(each)
    one.close_round()
    kept = np.setdiff1d(np.arange(WIDE.size), BOTH.places(NARROW))
    np.testing.assert_allclose(one.shared[kept], wide[kept], rtol=1e-6)


def test_vectors_go_to_their_cluster_alone() -> None:
    sketches = 4 * (16 + 1 + 4 + 2 * TOLD.sketch_rows * 2)
    cap = ClusterSettings(most_bytes=4 * NARROW.size * 2 + sketches)
    one = method(clusters=cap)
    far = np.float32(10)
    near = [vector(i) * np.float32(0.01) for i in range(4)]
    run_round(one, 1, *(update(1, i, near[i] + (far if i % 2 else -far)) for i in range(4)))
    opened = one.open_round(2)
    clusters = one.clusters
    assert clusters[name(0)] == clusters[name(2)] != clusters[name(1)] == clusters[name(3)]
    for index in range(4):
        attachment = opened.attachments[f"vector.{name(index)}"]
        assert name(index) in opened.cohorts[attachment.cohort]
        assert name((index + 1) % 4) not in opened.cohorts[attachment.cohort]
        np.testing.assert_array_equal(
            attachment.tensors["vector"], near[index] + (far if index % 2 else -far)
        )


def test_nothing_is_attached_before_the_warm_up_ends() -> None:
    one = method(training=replace(TOLD, warm_up_rounds=2))
    run_round(one, 1, update(1, 0, vector(0)), update(1, 1, vector(1)))
    assert not one.open_round(2).attachments
    one.close_round()
    assert len(one.open_round(3).attachments) == 2


def test_the_learning_rate_falls() -> None:
    one = method(training=replace(TOLD, learning_rate=0.1), rate_decay=0.5)
    rates = [one.open_round(round_id).settings["learning_rate"] for round_id in (1, 2, 4, 5000)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.0125, 1e-9])
    with pytest.raises(ValueError, match="rate_decay"):
        AttentionSettings(rate_decay=0.0)
    with pytest.raises(ValueError, match="rate_decay needs a learning_rate"):
        method(rate_decay=0.5)


def test_sketches_come_in_units_of_their_cluster() -> None:
    one = method()
    run_round(one, 1, *(update(1, i, vector(i)) for i in range(5)))
    opened = one.open_round(2)
    squared = (opened.tensors["sketches"] ** 2).sum(axis=2).mean(axis=0)
    np.testing.assert_allclose(squared, 1.0, rtol=1e-5)
    assert opened.tensors["scales"].shape == (1, 2)


def test_models_that_are_too_old_take_part_no_more() -> None:
    one = method(keep_rounds=2)
    run_round(one, 1, update(1, 0, vector(0)), update(1, 1, vector(1)))
    run_round(one, 2, update(2, 1, vector(2)))
    assert set(one.clusters) == {name(0), name(1)}
    run_round(one, 3, update(3, 1, vector(3)))
    assert set(one.clusters) == {name(1)}


@pytest.mark.parametrize("own_weight", [0.0, 1.0])
def test_a_mixture_is_made_for_whoever_asks_and_for_nobody_else(own_weight: float) -> None:
    told = replace(TOLD, own_weight=own_weight)
    one = method(training=told, mixture=MixtureSettings(rule="sketches"))
    updates = [update(1, i, vector(i), mixture=i == 0) for i in range(4)]
    run_round(one, 1, *updates)
    opened = one.open_round(2)
    mixture = opened.attachments[f"mixture.{name(0)}"]
    assert opened.cohorts[mixture.cohort] == (name(0),)
    assert f"mixture.{name(1)}" not in opened.attachments
    sketched = opened.tensors["sketches"]
    sharpness = SETTINGS.mixture.sharpness
    weights = sketch_weights(sketched[0], sketched[1:], sharpness, own_weight)
    heard = sum(weights[j] * vector(i) for j, i in enumerate((1, 2, 3, 0)))
    expected = 0.5 * heard + 0.5 * one.shared
    np.testing.assert_allclose(mixture.tensors["mixture"], expected, rtol=1e-4, atol=1e-5)


def test_a_mixture_over_widths_keeps_what_the_neighbour_lacks() -> None:
    told = replace(TOLD, aggregator_mixes=True)
    settings = AttentionSettings(
        training=told, mixture=MixtureSettings(rule="fedamp", amp_rate=10.0), half=False
    )
    one = AttentionMethod(np.zeros(WIDE.size, np.float32), BOTH, settings)
    narrow, wide = vector(0), vector(1, WIDE.size)
    run_round(one, 1, update(1, 0, narrow, rung=1), update(1, 1, wide, rung=2))
    opened = one.open_round(2)
    places = BOTH.places(NARROW)
    expected = wide.copy()
    expected[places] = narrow
    found = opened.attachments[f"mixture.{name(1)}"].tensors["mixture"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    found = opened.attachments[f"mixture.{name(0)}"].tensors["mixture"]
    np.testing.assert_allclose(found, wide[places], rtol=1e-5)


def shipped(*vectors: np.ndarray) -> tuple[AttentionMethod, Broadcast]:
    """With the defaults, after a round that brought these and one of warm-up."""
    one = AttentionMethod(np.zeros(NARROW.size, np.float32), FlatLadder((NARROW,)))
    warm = AttentionTraining().warm_up_rounds
    for number in range(1, warm + 1):
        run_round(one, number, *(update(number, i, each) for i, each in enumerate(vectors)))
    return one, one.open_round(warm + 1)


def mixture_of(opened: Broadcast, index: int) -> np.ndarray:
    return opened.attachments[f"mixture.{name(index)}"].tensors["mixture"].astype(np.float32)


def test_by_default_the_aggregator_mixes_what_alike_devices_have_in_common() -> None:
    _, opened = shipped(vector(0), vector(0), vector(1), vector(1))
    assert set(opened.attachments) == {f"mixture.{name(i)}" for i in range(4)}
    for index, own in enumerate((vector(0), vector(0), vector(1), vector(1))):
        np.testing.assert_allclose(mixture_of(opened, index), own, atol=2e-3)
    # A device fetches the global model and its mixture, however many others there are.
    told = opened.tensors
    assert {each: len(told[each]) for each in told if each != "global"} == {
        "senders": 0, "sketches": 0, "widths": 0, "clusters": 0, "scales": 0
    }  # fmt: skip
    assert opened.settings["aggregator_mixes"] is True


def test_where_no_device_is_like_another_all_start_from_the_global_model() -> None:
    apart = [np.zeros(NARROW.size, np.float32) for _ in range(3)]
    for index, each in enumerate(apart):
        each[index] = 1
    one, opened = shipped(*apart)
    for index in range(3):
        np.testing.assert_allclose(mixture_of(opened, index), one.shared, atol=1e-3)


def test_whoever_stayed_away_keeps_up_with_the_global_model() -> None:
    one = AttentionMethod(np.zeros(NARROW.size, np.float32), FlatLadder((NARROW,)))
    warm = AttentionTraining().warm_up_rounds
    for number in range(1, warm + 1):
        run_round(one, number, *(update(number, i, vector(i)) for i in range(4)))
    gaps = {i: vector(i) - one.shared for i in range(4)}
    for number in range(warm + 1, warm + 3):
        far = np.float32(10 * number)
        run_round(one, number, *(update(number, i, far + vector(i)) for i in (2, 3)))
    kept = {each.sender: each.tensors["vector"] for each in one._last}
    for index in (0, 1):
        np.testing.assert_allclose(kept[name(index)] - one.shared, gaps[index], atol=1e-4)
    # Nor do the two that stayed away look alike for that alone.
    gap = mixture_of(one.open_round(warm + 3), 0) - one.shared
    assert np.linalg.norm(gap) < 2 * np.linalg.norm(gaps[0])


def test_another_global_model_is_where_all_start() -> None:
    one, _ = shipped(vector(0), vector(0), vector(1))
    one.begin_with(NARROW.unflatten(vector(5)))
    opened = one.open_round(20)
    assert not opened.attachments
    np.testing.assert_array_equal(opened.tensors["global"], vector(5))


def test_likeness_weights_rise_with_what_is_in_common() -> None:
    rng = np.random.default_rng(0)
    common = rng.standard_normal(4096)
    like = np.stack([common + rng.standard_normal(4096) for _ in range(5)])[:, None]
    weights = likeness_weights(like[0], like[1:])
    np.testing.assert_allclose(weights, 0.5**2 / (1 + 3 * 0.5**2), atol=0.02)
    other = rng.standard_normal((1, 1, 4096))
    assert likeness_weights(like[0], np.concatenate([like[1:], -other]))[-1] < 0.02
    np.testing.assert_array_equal(likeness_weights(like[0], -like[1:]), 0)


def test_likeness_by_chance_counts_for_next_to_nothing_and_stays_so() -> None:
    # Twenty devices in no groups, whose gaps are what they start with and steps of their own.
    rng = np.random.default_rng(0)
    gaps = rng.standard_normal((20, 2, 64))
    for _ in range(30):
        heard = [likeness_weights(gaps[i], np.delete(gaps, i, 0)) for i in range(20)]
        start = [np.tensordot(a, np.delete(gaps, i, 0), 1) for i, a in enumerate(heard)]
        gaps = np.stack(start) + rng.standard_normal(gaps.shape)
        gaps -= gaps.mean(axis=0)
    assert np.mean([a.sum() for a in heard]) < 0.05


@pytest.mark.parametrize("length", [0.0, 1e-20, 0.1, 1.0, 10.0, 1e6])
def test_a_neighbour_moves_a_mixture_by_at_most_twice_its_listener_s_length(length: float) -> None:
    own = np.random.default_rng(0).standard_normal((2, 8))
    (weight,) = likeness_weights(own, length * own[None])
    assert weight * length <= 2


def test_sketch_weights_prefer_the_alike() -> None:
    query = np.zeros((1, 8))
    query[0, 0] = 1.0
    peers = np.stack([query, -query, np.zeros_like(query)])
    weights = sketch_weights(query, peers, 4.0)
    np.testing.assert_allclose(weights[:3], np.exp([0, -8, -2]) / np.exp([0, -8, -2]).sum())
    assert weights[3] == 0


def test_the_own_network_weighs_as_much_as_the_favourite() -> None:
    peers = np.random.default_rng(0).standard_normal((3, 2, 8)) / 3
    weights = sketch_weights(peers[0], peers[1:], 4.0, own_weight=1.0)
    assert weights[2] == weights[:2].max()
    assert weights.sum() == pytest.approx(1.0)


def test_amp_weights_fall_with_distance_and_never_exceed_one() -> None:
    settings = MixtureSettings(rule="fedamp", amp_rate=0.3, amp_sigma=1.0)
    weights = amp_weights(np.array([0.0, 1.0, 4.0]), settings, 1.0)
    np.testing.assert_allclose(weights, 0.3 * np.exp([-0.0, -1.0, -4.0]))
    assert amp_weights(np.zeros(9), settings, 1.0).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("bad-round", {"round_id": 2}),
        ("no-sender", {"sender": ""}),
        ("bad-tensors", {"tensors": {}}),
        ("bad-tensors", {"tensors": {"vector": vector(0), "more": vector(0)}}),
        ("bad-values", {"tensors": {"vector": vector(0)[:-1]}}),
        ("bad-values", {"tensors": {"vector": vector(0).astype(np.float16)}}),
        ("bad-values", {"tensors": {"vector": np.full(NARROW.size, np.nan, np.float32)}}),
        ("bad-values", {"tensors": {"vector": np.full(NARROW.size, 9.5e11, np.float32)}}),
        ("bad-metadata", {"metadata": {}}),
    ],
)
def test_bad_updates_are_refused(reason: str, changed: dict[str, object]) -> None:
    one = method()
    one.open_round(1)
    with pytest.raises(Refused) as caught:
        one.check(replace(update(1, 0, vector(0)), **changed))  # type: ignore[arg-type]
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "told",
    [{"samples": 0}, {"samples": 1.0}, {"samples": True}, {"rung": 1}, {"mixture": 1},
     {"loss": "low"}, {"loss": 1e13}, {"more": 1}],
)  # fmt: skip
def test_bad_metadata_is_refused(told: dict[str, object]) -> None:
    one = method()
    one.open_round(1)
    with pytest.raises(Refused) as caught:
        one.check(update(1, 0, vector(0), **told))
    assert caught.value.reason == "bad-metadata"


def test_a_device_counts_once_a_round() -> None:
    one = method()
    one.open_round(1)
    one.absorb(update(1, 0, vector(0)))
    with pytest.raises(Refused) as caught:
        one.check(update(1, 0, vector(1)))
    assert caught.value.reason == "repeated"


def test_a_newer_model_takes_the_place_of_one_carried_over() -> None:
    one = method()
    one.open_round(1)
    carried = update(1, 0, vector(0))
    one.check(carried)
    one.open_round(2)  # the quorum was missed: the round begins with what was counted
    one.absorb(carried)
    newer = update(2, 0, vector(1))
    one.check(newer)
    one.absorb(newer)
    assert one.close_round().participants == 1
    np.testing.assert_allclose(one.shared, vector(1), rtol=1e-6)


def test_a_claim_of_many_samples_is_capped() -> None:
    one = method(most_samples=30)
    run_round(one, 1, update(1, 0, vector(0), samples=1 << 40), update(1, 1, vector(1), samples=10))
    np.testing.assert_allclose(one.shared, 0.75 * vector(0) + 0.25 * vector(1), rtol=1e-6)


def test_a_forgotten_device_is_handed_on_no_more() -> None:
    sketches = 4 * (16 + 1 + 4 + 2 * TOLD.sketch_rows * 2)
    one = method(clusters=ClusterSettings(most_bytes=4 * NARROW.size * 2 + sketches))
    far = [-10, 10, 10, -10]
    run_round(one, 1, *(update(1, i, vector(i) + np.float32(far[i])) for i in range(4)))
    shared = one.shared
    one.forget(name(7))  # nobody
    for index in (0, 3):  # the whole of one cluster
        one.forget(name(index))
    opened = one.open_round(2)
    assert set(opened.attachments) == {f"vector.{name(1)}", f"vector.{name(2)}"}
    assert opened.cohorts == {"cluster.0": (name(1), name(2))}
    assert len(opened.tensors["sketches"]) == len(opened.tensors["widths"]) == 2
    np.testing.assert_array_equal(one.shared, shared)
    one.close_round()
    run_round(one, 3, update(3, 0, vector(0)))
    assert set(one.clusters) == {name(0), name(1), name(2)}


def test_tasks_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="most_bytes"):
        method(clusters=ClusterSettings(most_bytes=NARROW.size * 4))
    with pytest.raises(ValueError, match="does not lie in"):
        AttentionMethod(vector(0), FlatLadder((WIDE, NARROW)), SETTINGS)
    with pytest.raises(ValueError, match="40"):
        AttentionMethod(vector(0), BOTH, SETTINGS)
    with pytest.raises(ValueError, match="aggregator_mixes"):
        AttentionSettings(training=TOLD, mixture=MixtureSettings(rule="fedamp"))
    with pytest.raises(ValueError, match="keep_rounds"):
        AttentionSettings(keep_rounds=0)
    with pytest.raises(ValueError, match="most_samples is -1"):
        AttentionSettings(most_samples=-1)
    with pytest.raises(ValueError, match="does not follow"):
        one = method()
        one.open_round(1)
        one.open_round(1)
