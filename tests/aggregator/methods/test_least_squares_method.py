"""The aggregator's half of least squares, against its formula computed densely in float64."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.method import ModelMismatch
from aggregator.methods.robust import RobustRule
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.scatter_loss import (
    DistinctSenders,
    LeastSquaresLoss,
    LeastSquaresSettings,
    weights_by_rule,
)
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.methods.scatter.factor_step import NumpyStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.least_squares import LeastSquares
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Broadcast, Update
from tests.fakes.scatter_updates import ONE_WIDTH, of_gradient, one_user, users

ITEMS, K, DEVICES = 30, 5, 24
SPREAD = 0.01
UNLIMITED: dict[str, Any] = {"clip_multiple": 0.0, "row_multiple": 0.0}


def method(**chosen: Any) -> ScatterMethod:
    first = initial_items(ITEMS, K, 0.1, np.random.default_rng(0))
    return ScatterMethod(first, ScatterSettings(least_squares=ONE_WIDTH, **chosen))


class Home:
    """What one device's users like: groups of items, so that there is something to learn."""

    def __init__(self, place: int, people: int, items: int = ITEMS) -> None:
        rng = np.random.default_rng([7, place])
        self.rows = [self._liked(rng, items) for _ in range(people)]

    @staticmethod
    def _liked(rng: np.random.Generator, items: int) -> np.ndarray:
        group = np.flatnonzero(np.arange(items) % 3 == rng.integers(3))
        return np.sort(rng.choice(group, size=4, replace=False)).astype(np.int64)

    def positives(self) -> Sequence[np.ndarray]:
        return self.rows


def fleet(devices: int = DEVICES) -> list[ScatterLearner]:
    """Of one user, of two or of many; of all columns or of some."""
    return [
        ScatterLearner(
            Home(place, (1, 2, 1, 9)[place % 4]),
            NumpyStep(),
            (K, 2)[place % 3 == 0],
            np.random.default_rng(place),
        )
        for place in range(devices)
    ]


def sent(
    learners: Sequence[ScatterLearner], told: Broadcast, places: Sequence[int]
) -> list[Update]:
    return [
        Update(told.round_id, learners[place].train(told).tensors, sender=f"{place:032x}")
        for place in places
    ]


def absorbed(one: ScatterMethod, updates: Sequence[Update]) -> None:
    for update in updates:
        one.check(update)
        one.absorb(update)


def bits(one: ScatterMethod) -> bytes:
    return pack_state(one.state())


class Dense:
    """The module's docstring, word for word, in float64."""

    def __init__(self, items: np.ndarray) -> None:
        self.items = items.astype(np.float64)
        self.has, self.people = np.zeros(len(items)), 0.0
        self.heard = np.zeros(len(items))
        self.outer, self.outer_heard = np.zeros((K, K)), 0.0
        self.devices: set[str] = set()

    def step(self, updates: Sequence[Update]) -> None:
        gradient, outer = np.zeros(self.items.shape), np.zeros((K, K))
        named, people = np.zeros(len(self.items)), 0
        for update in updates:
            t = {name: array.astype(np.float64) for name, array in update.tensors.items()}
            rows = update.tensors["rows"]
            gradient[rows] += t["pulls"] @ t["factor"]
            outer += t["factor"].T @ t["factor"]
            named[rows] += t["counts"]
            people += int(t["users"])
            self.devices.add(update.sender)
        everybody = max(people, len(self.devices) * people / len(updates), 1)
        aged = 0.9 ** (people / everybody)
        self.has = aged * self.has + named
        self.people = aged * self.people + people
        p = self.has / self.people
        a0, l2 = weights_by_rule(p, everybody)
        kept = 0.5 ** (people / everybody)
        left = max(0.0, 1 - people / (4 * K))
        self.outer, self.outer_heard = left * self.outer + outer, left * self.outer_heard + people
        mean = self.outer / self.outer_heard
        self.heard = kept * self.heard + named
        for i in range(len(self.items)):
            if not self.has[i]:
                length = np.linalg.norm(self.items[i])
                self.items[i] *= min(1, max(kept, SPREAD * K**0.5 / length))
                continue
            if not named[i]:
                continue  # its users were not heard
            g = p[i] * gradient[i] / named[i] if named[i] else 0.0
            slope = g + a0 * mean @ self.items[i] + l2 * (p[i] + a0) * self.items[i]
            step = np.linalg.solve((a0 + p[i]) * (mean + l2 * np.eye(K)), slope)
            self.items[i] -= named[i] / self.heard[i] * step

    def require(self, items: np.ndarray) -> None:
        """Ours, but for a turn, which is taken over, into their principal axes."""
        turn = turn_onto(self.items, items)
        self.items, self.outer = self.items @ turn, turn.T @ self.outer @ turn
        np.testing.assert_allclose(items, self.items, rtol=2e-3, atol=2e-4)
        squares = items.astype(np.float64).T @ items
        lengths = np.diagonal(squares)
        assert np.abs(squares - np.diag(lengths)).max() < 1e-5 * lengths.max()
        assert (np.diff(lengths) <= 1e-5 * lengths.max()).all()


def turn_onto(items: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The turn that brings the one matrix nearest to the other."""
    left, _, right = np.linalg.svd(items.T.astype(np.float64) @ others)
    turn: np.ndarray = left @ right
    return turn


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("limits", [UNLIMITED, {}], ids=["without limits", "within the limits"])
def test_rounds_are_the_formula(share: float, limits: dict[str, float]) -> None:
    one, learners, rng = method(**limits), fleet(), np.random.default_rng(3)
    dense = Dense(one.items)
    for number in range(1, 7):
        places = rng.choice(DEVICES, size=round(share * DEVICES), replace=False)
        updates = sent(learners, one.open_round(number), places.tolist())
        if limits == {}:
            # As many users on a device as is usual, or a few times that, are no claim.
            updates = [each for each in updates if each.tensors["users"] < 9]
        absorbed(one, updates)
        summary = one.close_round()
        dense.step(updates)
        assert summary.metrics["clipped"] == 0
        dense.require(one.items)


def test_a_fleet_learns_its_groups_in_a_few_rounds() -> None:
    """The items of a group come to lie together: what a user of it likes is what it is shown."""
    one, learners = method(), fleet()
    for number in range(1, 6):
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
    told = one.open_round(6)
    hits = []
    for learner in learners:
        positives = learner._interactions.positives()
        for vector, own in zip(learner.vectors(told), positives, strict=True):
            scores = told.tensors["items"] @ vector
            scores[own] = -np.inf
            hits.append((np.argsort(scores)[-3:] % 3 == own[0] % 3).mean())
    assert np.mean(hits) > 0.9


def test_a_closed_round_leaves_no_sums() -> None:
    one, learners = method(), fleet()
    for number in (1, 2):
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
        state = one.state()
        assert not state["loss.people"] and not state["loss.named"].any()
        assert "loss.gram.sum" not in state and not len(state["loss.senders.recent"])


def test_items_that_nobody_has_shrink_to_a_new_ones_length_and_old_states_are_refused() -> None:
    one, learners = method(), fleet()
    for number in (1, 2):
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
    short = one.state()
    fresh = np.full((2, K), 0.05, dtype=np.float32)
    one.grow(fresh)
    before = one.items
    told = one.open_round(3)
    absorbed(one, sent(learners, told, range(DEVICES)))
    one.close_round()
    lengths = np.linalg.norm(one.items, axis=1) / np.linalg.norm(fresh[0])
    np.testing.assert_allclose(lengths[ITEMS:], 0.5, rtol=0.02)
    assert not np.allclose(lengths[:ITEMS], np.linalg.norm(before[:ITEMS], axis=1), rtol=1e-3)
    told = one.open_round(4)
    updates = sent(learners, told, range(DEVICES))
    likes = Update(4, one_user(K, [0, ITEMS + 1], [-1, -1]), sender="ff" * 16)
    absorbed(one, [*updates, likes])
    one.close_round()
    lengths = np.linalg.norm(one.items, axis=1) / np.linalg.norm(fresh[0])
    assert lengths[ITEMS] == pytest.approx(0.25, rel=0.05) and lengths[ITEMS + 1] > 0.6
    for name in ("loss.seen", "loss.heard", "loss.named"):
        with pytest.raises(RestoreError):
            one.restore({**one.state(), name: short[name]})


def test_a_version_that_is_gone_back_to_keeps_what_is_known_of_the_data() -> None:
    """How common items are, who was heard of them lately, and how many users there are; not where
    its users' vectors were."""
    one, learners = method(**UNLIMITED), fleet()
    dense = Dense(one.items)
    for number in (1, 2):
        if number == 2:
            version = dict(one.model_arrays)
        updates = sent(learners, one.open_round(number), range(DEVICES))
        absorbed(one, updates)
        one.close_round()
        dense.step(updates)
        dense.require(one.items)
    assert version.keys() == {"items", "solve"} and one.derived == {"solve"}
    told = one.open_round(3).tensors["solve"]
    np.testing.assert_allclose(dict(one.model_arrays)["solve"], told, rtol=1e-3)
    one.adopt(version)
    assert one.version == 3
    np.testing.assert_allclose(one.items, version["items"], rtol=1e-4, atol=1e-6)
    opened = one.open_round(4)
    np.testing.assert_array_equal(opened.tensors["solve"], told)
    dense.items = version["items"].astype(np.float64)
    dense.outer[:], dense.outer_heard = 0, 0
    updates = sent(learners, opened, range(DEVICES))
    absorbed(one, updates)
    one.close_round()
    dense.step(updates)
    dense.require(one.items)


def test_what_a_task_begins_with_is_the_items_alone() -> None:
    begun, other = method(), method()
    items = np.random.default_rng(1).standard_normal((ITEMS, K)).astype(np.float32)
    begun.begin_with({"items": items, "solve": np.ones(2, np.float32)})
    other.begin_with({"items": items})
    assert bits(begun) == bits(other)
    short = method()
    short.begin_with({"items": items[:-3]})
    lengths = (np.linalg.norm(each.items[-3:], axis=1) for each in (short, method()))
    np.testing.assert_allclose(*lengths, rtol=1e-5)
    for odd in ({}, {"items": items, "other": items}, {"items": items[0]}):
        with pytest.raises(ModelMismatch):
            begun.begin_with(odd)
    assert bits(begun) == bits(other)


@pytest.mark.parametrize(("robust", "share"), [("median", 0.5), ("trimmed", 0.2)])
def test_a_robust_rule_holds_for_both_sums(robust: str, share: float) -> None:
    """Each cell of the gradient over those who touched it, each of the Gram matrix over all."""
    one = method(robust=robust, trim_share=0.2, **UNLIMITED)
    rng = np.random.default_rng(5)
    rows = [np.sort(rng.choice(ITEMS, 12, replace=False)) for _ in range(11)]
    devices = [one_user(K, own, rng.standard_normal(12), rng.standard_normal(K)) for own in rows]
    before = one.items.astype(np.float64)
    one.open_round(1)
    absorbed(one, [Update(1, each, sender=f"{n:032x}") for n, each in enumerate(devices)])
    one.close_round()

    def mean(values: list[float]) -> float:
        ordered = sorted(values)
        cut = RobustRule(robust, 0.2).cut(np.array([len(ordered)]))[0]  # type: ignore[arg-type]
        kept = ordered[cut : len(ordered) - cut]
        return sum(kept) / len(kept)

    named, gradient = np.zeros(ITEMS), np.zeros((ITEMS, K))
    for i in range(ITEMS):
        having = [each for each, own in zip(devices, rows, strict=True) if i in own]
        named[i] = len(having)
        for j in range(K):
            cells = [
                float(each["pulls"][each["rows"] == i, 0][0] * each["factor"][0, j])
                for each in having
            ]
            gradient[i, j] = mean(cells) if cells else 0.0
    squares = np.zeros((K, K))
    for a in range(K):
        for b in range(K):
            squares[a, b] = mean([float(e["factor"][0, a] * e["factor"][0, b]) for e in devices])
    values, vectors = np.linalg.eigh((squares + squares.T) / 2)
    squares = (vectors * values.clip(0)) @ vectors.T
    p = named / 11
    a0, l2 = weights_by_rule(p, 11)
    expected = before.copy()
    for i in np.flatnonzero(named):
        slope = p[i] * gradient[i] + a0 * squares @ before[i] + l2 * (p[i] + a0) * before[i]
        expected[i] -= np.linalg.solve(squares + l2 * np.eye(K), slope) / (p[i] + a0)
    assert named.all()
    turned = expected @ turn_onto(expected, one.items)
    np.testing.assert_allclose(one.items, turned, rtol=2e-3, atol=1e-4)


def test_the_rule_for_the_weights() -> None:
    """Nothing known; a density of which six times is a0, at most 1; lambda falls with users."""
    np.testing.assert_array_equal(weights_by_rule(np.zeros(4), 0), [0.1, 0.02])
    np.testing.assert_array_equal(weights_by_rule(np.zeros(4), 0, 0.7), [0.7, 0.02])
    common = np.full(1000, 0.02)
    assert weights_by_rule(common, 500)[0] == pytest.approx(0.12)
    assert weights_by_rule(np.full(10, 0.9), 500)[0] == 1.0
    assert weights_by_rule(common, 500, 0.3)[0] == 0.3
    few, many = (weights_by_rule(common, count)[1] for count in (50, 50_000))
    assert 0 < many < few
    for people in (0.0, 1.0, 1e9):
        for size in (1e-9, 1e-3, 1.0):
            a0, l2 = weights_by_rule(np.full(50, size), people)
            assert 0 < a0 <= 1 and 0 < l2 <= 1e3 and math.isfinite(l2)


def test_settings_stand_above_the_rule() -> None:
    chosen = LeastSquaresSettings(unseen_weight=0.25, l2=0.5)
    loss = LeastSquaresLoss((ITEMS, K), chosen)
    tensors, told = loss.told(np.ones((ITEMS, K), np.float32))
    assert told == {"loss": "least-squares"}
    np.testing.assert_array_equal(tensors["solve"], np.array([0.25, 0.5], np.float16))
    np.testing.assert_array_equal(tensors["strengths"], np.ones(K, np.float16))
    for name, value in (
        ("unseen_weight", -1.0), ("unseen_weight", math.nan), ("l2", 1e9), ("most_columns", -1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            LeastSquaresSettings(**{name: value})  # type: ignore[arg-type]


# Devices that were counted lately.


def counted(names: Sequence[int], settles: int = 0) -> DistinctSenders:
    one = DistinctSenders()
    for place, name in enumerate(names):
        one.note(f"{name:032x}")
        if settles and place % settles == settles - 1:
            one.close(1)
    return one


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2000), max_size=1000), st.integers(1, 5), st.integers(0, 99))
def test_distinct_senders_are_exact_below_1024_in_any_order_over_any_shards(
    names: list[int], shards: int, seed: int
) -> None:
    whole = counted(names)
    assert whole.count == len(set(names))
    order = np.random.default_rng(seed).permutation(len(names))
    parts = [counted([names[p] for p in order[place::shards]]) for place in range(shards)]
    first, *others = parts
    for each in others:
        first.merge(each.share())
    assert pack_state(first.state()) == pack_state(whole.state())
    assert counted(names, settles=7).count == len(set(names))
    again = DistinctSenders().restored(unpack_state(pack_state(first.state())))
    assert pack_state(again.state()) == pack_state(whole.state())


@pytest.mark.parametrize("devices", [1023, 1024, 1500, 20_000])
def test_above_that_they_are_a_few_per_cent_off_and_mergeable(devices: int) -> None:
    whole = counted(range(devices))
    assert whole.count == pytest.approx(devices, rel=0.1 if devices > 1023 else 0)
    parts = [counted(range(place, devices, 3)) for place in range(3)]
    parts[0].merge(parts[1].share())
    parts[0].merge(parts[2].share())
    assert parts[0].count == whole.count
    parts[0].close(devices)
    whole.close(devices)
    assert pack_state(parts[0].state()) == pack_state(whole.state())
    whole_again = counted([*range(devices), *range(devices)], settles=4000)
    whole_again.close(2 * devices)
    assert whole_again.count == whole.count, "nobody counts twice"
    assert sum(array.nbytes for array in whole.state().values()) <= 3 * 8192


@pytest.mark.parametrize("devices", [1, 60, 3000])
def test_devices_that_are_gone_are_forgotten_after_some_passes_of_the_others(devices: int) -> None:
    one = DistinctSenders()
    for round_number in range(4):
        for name in range(devices):
            one.note(f"{round_number * devices + name:032x}")
        one.close(devices)
    assert one.count == pytest.approx(4 * devices, rel=0.1)
    for _ in range(28):
        one.begin(1)
        for name in range(devices):
            one.note(f"{name:032x}")
        assert one.count >= 0.9 * devices
        one.close(devices)
    assert one.count == pytest.approx(devices, rel=0.1)


# The width follows the data.


def growing(width: int, most: int, items: int = 60) -> ScatterMethod:
    chosen = ScatterSettings(least_squares=LeastSquaresSettings(most_columns=most))
    first = initial_items(items, width, 0.1, np.random.default_rng(0))
    return ScatterMethod(first, chosen, spread=0.1, seed=5)


def test_the_width_grows_alike_on_all_shards_and_after_restarts() -> None:
    learners = fleet(40)
    whole, other = growing(2, 8, ITEMS), growing(2, 8, ITEMS)
    widths = []
    for number in range(1, 7):
        told = whole.open_round(number)
        updates = sent(learners, told, range(40))
        absorbed(whole, updates)
        whole.close_round()
        widths.append(whole.items.shape[1])
        again = growing(2, 8, ITEMS)
        again.restore(unpack_state(pack_state(other.state())))
        other = again
        other.open_round(number)
        absorbed(other, updates[::-1])
        other.close_round()
        assert bits(other) == bits(whole)
    assert widths[0] >= 2 and widths[-1] in (4, 8) and widths == sorted(widths)
    narrow = Update(7, of_gradient([0], np.ones((1, 2))), sender="0" * 32)
    whole.open_round(7)
    with pytest.raises(Exception, match="bad-"):
        whole.check(narrow)


def test_a_model_that_has_grown_is_gone_on_from_under_the_settings_it_began_with() -> None:
    grown = np.ones((ITEMS, 4), dtype=np.float32)
    one = growing(2, 8, ITEMS)
    assert one.fits("items", grown) and not one.fits("items", grown[1:])
    assert not one.fits("items", grown[:, :0]) and not one.fits("other", grown)
    assert not growing(2, 0, ITEMS).fits("items", grown)  # this one stays as it is
    one.begin_with({"items": grown})
    again = growing(2, 8, ITEMS)
    again.restore(unpack_state(pack_state(one.state())))
    assert again.items.shape == (ITEMS, 4)
    with pytest.raises(RestoreError, match="'columns'"):
        growing(4, 8, ITEMS).restore(one.state())


def test_updates_of_nobody_change_nothing_of_what_is_known_of_the_items() -> None:
    one, learners = method(), fleet()
    absorbed(one, sent(learners, one.open_round(1), range(DEVICES)))
    one.close_round()
    before = one.items
    one.open_round(2)
    nobody = users([], np.empty((0, 0)), np.empty((0, K)), 1)
    absorbed(one, [Update(2, nobody, sender="ff" * 16)])
    summary = one.close_round()
    assert summary.participants == 1 and np.isfinite(list(summary.metrics.values())).all()
    np.testing.assert_allclose(one.items, before, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("empty", [1, 40])
def test_rounds_before_anybody_has_an_item_leave_a_model_that_learns(empty: int) -> None:
    """Of items of no length all vectors, and so all gradients, would be zero for ever."""
    one, learners = method(), fleet()
    nobody = [ScatterLearner(NoItems(), NumpyStep(), K, np.random.default_rng(n)) for n in range(4)]
    for number in range(1, empty + 1):
        absorbed(one, sent(nobody, one.open_round(number), range(4)))
        one.close_round()
    for number in range(empty + 1, empty + 8):
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
    lengths = np.linalg.norm(one.items, axis=1)
    assert lengths.min() > 0.05 and lengths.max() > 0.5


class NoItems:
    """A device of a user that has nothing yet."""

    def positives(self) -> Sequence[np.ndarray]:
        return [np.empty(0, dtype=np.int64)]


def test_items_without_users_fade_as_the_fleet_passes_however_small_its_rounds() -> None:
    """What a model brings along is not halved a round before its users had a turn."""
    one, learners = method(**UNLIMITED), fleet()
    for number in range(1, DEVICES + 1):
        absorbed(one, sent(learners, one.open_round(number), [number - 1]))
        one.close_round()
    begun = np.random.default_rng(1).standard_normal((ITEMS, K)).astype(np.float32)
    one.grow(begun)
    for number in range(DEVICES + 1, 2 * DEVICES + 1):
        absorbed(one, sent(learners, one.open_round(number), [number - DEVICES - 1]))
        one.close_round()
    lengths = [np.linalg.norm(each, axis=1) for each in (begun, one.items[ITEMS:])]
    shares = lengths[1] / lengths[0]
    assert 0.3 < shares.min() <= shares.max() < 0.8


def test_an_item_whose_users_are_gone_fades_as_one_that_nobody_has() -> None:
    """Whoever lifts an item that nobody else has does not lift it for ever."""
    one, learners = method(**UNLIMITED), fleet()
    for number in range(1, 4):
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
    one.grow(np.full((1, K), 0.01, dtype=np.float32))
    told = one.open_round(4)
    lift = Update(4, one_user(K, [ITEMS], [-30], told.tensors["items"][0]), sender="ff" * 16)
    absorbed(one, [*sent(learners, told, range(DEVICES)), lift])
    one.close_round()
    lengths = []
    for number in range(5, 25):
        lengths.append(float(np.linalg.norm(one.items[ITEMS])))
        absorbed(one, sent(learners, one.open_round(number), range(DEVICES)))
        one.close_round()
    assert lengths[0] > 0.2
    assert lengths[3] == pytest.approx(lengths[0])  # as one whose user misses a few rounds
    assert lengths[-1] == pytest.approx(SPREAD * K**0.5)


def large_round(robust: str) -> ScatterMethod:
    """A first round, which is held, of updates that unfold to thirty times their bytes."""
    items, width, count = 500, 128, 100
    first = initial_items(items, width, 0.1, np.random.default_rng(0))
    one = ScatterMethod(first, ScatterSettings(robust=robust))  # type: ignore[arg-type]
    one.open_round(1)
    vector = np.linspace(-1, 1, width)
    updates = [
        Update(1, one_user(width, np.arange(items), np.ones(items), vector), sender=f"{n:032x}")
        for n in range(count)
    ]
    absorbed(one, updates)
    return one


def test_a_held_round_is_judged_in_the_memory_of_one_update_after_another() -> None:
    one = large_round("none")
    tracemalloc.start()
    one.close_round()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    unfolded = 100 * 500 * 128 * 4
    assert peak < unfolded / 4


def test_a_robust_round_is_full_by_what_its_updates_unfold_to() -> None:
    """All of it is in memory at once when the round is closed, not what came over the wire."""
    one = large_round("median")
    held = one._held.nbytes
    assert held > 100 * (500 * 128 + 128**2) * 4
    again = large_round("median")
    again.restore(unpack_state(pack_state(one.state())))
    assert again._held.nbytes == held


@pytest.mark.parametrize("people", [1, 65536])
@pytest.mark.parametrize("robust", ["none", "median"])
def test_who_names_all_items_drives_no_weight_away(people: int, robust: str) -> None:
    """The rule's a0 is six times the density: one device of thirty says a little of it."""
    items = 600
    homes = [Home(place, 1, items) for place in range(29)]
    learners = [
        ScatterLearner(home, NumpyStep(), K, np.random.default_rng(place))
        for place, home in enumerate(homes)
    ]
    a0 = []
    for attacks in (False, True):
        first = initial_items(items, K, 0.1, np.random.default_rng(0))
        one = ScatterMethod(first, ScatterSettings(robust=robust, least_squares=ONE_WIDTH))  # type: ignore[arg-type]
        for number in range(1, 5):
            updates = sent(learners, one.open_round(number), range(29))
            if attacks:
                evil = one_user(K, np.arange(items), np.full(items, -0.5))
                evil["users"] = np.asarray(people)
                evil["counts"] = np.full(items, people)
                updates.append(Update(number, evil, sender="ff" * 16))
            absorbed(one, updates)
            one.close_round()
        a0.append(one.model_arrays["solve"][0])
    assert a0[0] < a0[1] < 4 * a0[0]


@pytest.mark.parametrize("length", [1e-9, 0.1, 8.0, 1e6])
@pytest.mark.parametrize("items", [3, 2000])
def test_a_model_is_told_as_its_decomposition(length: float, items: int) -> None:
    """Items of orthogonal columns, and the strengths of those, which fall; in fewer directions than
    columns where there are fewer items."""
    rng, width = np.random.default_rng(0), 16
    common = np.outer(rng.random(items), rng.standard_normal(width))
    vectors = length * (common + 0.01 * rng.standard_normal((items, width)))
    loss = LeastSquaresLoss((items, width), LeastSquaresSettings(1.0, 1e-4))
    turned = loss.turned(vectors.astype(np.float32))
    scores = vectors @ vectors.T
    np.testing.assert_allclose(turned @ turned.T, scores, atol=1e-5 * np.abs(scores).max())
    tensors, _ = loss.told(turned)
    posed = LeastSquares.of(tensors)
    strengths = posed.strengths.astype(np.float64)
    atol = 1e-5 * float(strengths[0])
    assert posed.l2 == pytest.approx(1e-4, rel=1e-3) and (np.diff(strengths) <= atol).all()
    np.testing.assert_allclose(posed.items * strengths, turned, rtol=1e-5, atol=atol)
    some = min(items, width)
    squares = posed.items.T.astype(np.float64) @ posed.items / items
    np.testing.assert_allclose(squares[:some, :some], np.eye(some), atol=0.02)
