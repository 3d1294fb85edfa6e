"""Rungs of a ladder, added up: each coordinate is the mean over those who trained it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Refused
from aggregator.methods.robust import RobustRule
from aggregator.methods.submodels import LEAST_COVERAGE, Ladder, Rung, Slices, unit_orders
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.artifact.submodels import Basis, Piece
from device_sdk.methods.fedavg.contract import (
    FedAvgTraining,
    SharedTensor,
    own_rung,
    rung_name,
    shared_tensors,
)
from device_sdk.methods.state import RestoreError, State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from tests.fakes.ladders import (
    FULL,
    arrays_of,
    factored_rung,
    ladder_method,
    layout_of,
    movable_method,
    sliced_rung,
)
from tests.fakes.method_cases import sender

WIDE, TALL = (6, 9), (9, 6)


def moved(method: FedAvgMethod, before: np.ndarray) -> np.ndarray:
    return np.asarray(method.model["net.w"] - before, np.float64)


def close(method: FedAvgMethod, updates: Sequence[Update]) -> None:
    for each in updates:
        method.check(each)
        method.absorb(each)
    method.close_round()


def update(
    opened: Broadcast, rung: int, seed: int, samples: int = 10, scale: float = 0.1
) -> Update:
    """Of a device that trains ``rung``, as if its tensors had moved at random."""
    rng = np.random.default_rng(seed)
    told = opened.attachments[rung_name(rung)].tensors
    tensors = {
        name: (scale * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in told.items()
        if not name.endswith(".scale")
    }
    metadata = {"loss": 0.5, "samples": samples, "rung": rung}
    return Update(opened.round_id, tensors, metadata, sender(seed))


@pytest.mark.parametrize("shape", [WIDE, TALL, (5, 5), (4, 3, 2, 2)])
def test_every_rung_begins_at_the_best_approximation_of_its_rank(shape: tuple[int, ...]) -> None:
    method = ladder_method(shape, ranks=(1, 2))
    whole = method.model["net.w"].reshape(shape[0], -1)
    opened = method.open_round(1)
    u, s, v = np.linalg.svd(whole, full_matrices=False)
    for rung, rank in ((1, 1), (2, 2)):
        told = opened.attachments[rung_name(rung)].tensors
        product = (told["w.net.w.left"] * told["w.net.w.scale"]) @ told["w.net.w.right"]
        np.testing.assert_allclose(product, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5)
        assert told["w.net.b"].tolist() == method.model["net.b"].tolist()
    full = opened.attachments[rung_name(3)].tensors["w.net.w"]
    np.testing.assert_array_equal(full, whole)


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_a_rung_by_itself_moves_the_full_model_as_its_factors_moved(shape: tuple[int, int]) -> None:
    """To first order: what their product moved but for the product of the two moves."""
    method = ladder_method(shape, ranks=(2,))
    before = method.model["net.w"].copy()
    opened = method.open_round(1)
    sent = update(opened, 1, seed=3, scale=1e-3)
    told = opened.attachments[rung_name(1)].tensors
    left, scale, right = (told[f"w.net.w.{role}"] for role in ("left", "scale", "right"))
    close(method, [sent])
    d_left, d_right = sent.tensors["w.net.w.left"], sent.tensors["w.net.w.right"]
    exact = ((left + d_left) * scale) @ (right + d_right) - (left * scale) @ right
    np.testing.assert_allclose(moved(method, before), exact, atol=2e-5)


def test_what_only_the_full_model_trains_is_not_diluted_by_the_others() -> None:
    method = ladder_method(WIDE, ranks=(2,))
    before = method.model["net.w"].copy()
    basis = Basis.of(before)
    opened = method.open_round(1)
    full, low = update(opened, 2, seed=1), update(opened, 1, seed=2)
    deep = np.outer(basis.left[:, 5], basis.right[5]).astype(np.float32)
    full = Update(1, {**full.tensors, "w.net.w": 0.1 * deep}, dict(full.metadata), full.sender)
    still = {name: np.zeros_like(array) for name, array in low.tensors.items()}
    close(method, [full, Update(1, still, dict(low.metadata), low.sender)])
    np.testing.assert_allclose(moved(method, before), 0.1 * deep, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(rungs=st.lists(st.integers(1, 3), min_size=1, max_size=12), seed=st.integers(0, 999))
def test_slices_are_averaged_over_those_who_trained_each_coordinate(
    rungs: list[int], seed: int
) -> None:
    shape, sizes = (4, 6), ((1, 2), (2, 4), (4, 6))
    method = ladder_method(shape, slices=sizes[:2])
    before = method.model["net.w"].copy()
    opened = method.open_round(1)
    sent = [update(opened, rung, seed + place) for place, rung in enumerate(rungs)]
    close(method, sent)
    total, weight = np.zeros(shape), np.zeros(shape)
    for rung, each in zip(rungs, sent, strict=True):
        m, n = sizes[rung - 1]
        total[:m, :n] += 10 * each.tensors["w.net.w"].astype(np.float64)
        weight[:m, :n] += 10
    least = LEAST_COVERAGE * 10 * len(rungs)
    expected = total / np.maximum(weight, least)
    np.testing.assert_allclose(moved(method, before), expected, atol=1e-5)


def added_up_in_shards(
    make: Callable[[], FedAvgMethod], start: State, updates: Sequence[Update], shards: int
) -> FedAvgMethod:
    """Round 2 from a stored state, closed, whose updates came to so many shards, each from the
    last."""
    parts = []
    for shard in range(shards):
        other = make()
        other.restore(unpack_state(pack_state(start)))
        other.open_round(2)
        for each in updates[shard::shards][::-1]:
            other.absorb(each)
        parts.append(other)
    first, *others = parts
    for one in others:
        first.merge(one.share())
    first.close_round()
    return first


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([WIDE, TALL, (5, 5)]),
    rungs=st.lists(st.integers(1, 3), min_size=4, max_size=9),
    seed=st.integers(0, 999),
    shards=st.integers(1, 3),
)
def test_any_order_shards_and_restarts_give_the_same_bits(
    shape: tuple[int, int], rungs: list[int], seed: int, shards: int
) -> None:
    def fleet(number: int, opened: Broadcast) -> list[Update]:
        return [update(opened, rung, seed + 100 * number + p) for p, rung in enumerate(rungs)]

    one = ladder_method(shape, ranks=(1, 3))
    close(one, fleet(1, one.open_round(1)))  # the fleet's norms are known from here on
    start = one.state()
    opened = one.open_round(2)
    assert one.adds_up
    sent = fleet(2, opened)
    first = added_up_in_shards(lambda: ladder_method(shape, ranks=(1, 3)), start, sent, shards)
    close(one, sent)
    for name, array in one.state().items():
        assert array.tobytes() == first.state()[name].tobytes(), name


def test_a_restored_round_is_cut_by_the_bases_that_its_devices_were_told() -> None:
    """Another machine's decomposition may have other signs: the state holds them."""
    one = ladder_method(WIDE, ranks=(2,))
    opened = one.open_round(1)
    state = one.state()
    flipped = state["bases"].copy()
    flipped *= -1  # as another library could have it: U and V both with the other sign
    flipped[6 * 6 : 6 * 6 + 6] *= -1  # but not the singular values
    other = ladder_method(WIDE, ranks=(2,))
    other.restore({**state, "bases": flipped})
    told = other.open_round(2).attachments[rung_name(1)].tensors["w.net.w.left"]
    before = opened.attachments[rung_name(1)].tensors["w.net.w.left"]
    np.testing.assert_array_equal(told, -before)


def test_whoever_is_alone_on_a_rung_moves_it_by_no_more_than_two_shares() -> None:
    method = ladder_method(WIDE, ranks=(1,))
    before = method.model["net.w"].copy()
    deep = np.outer(Basis.of(before).left[:, 5], Basis.of(before).right[5]).astype(np.float32)
    opened = method.open_round(1)
    low = [update(opened, 1, seed, scale=0.0) for seed in range(99)]
    alone = update(opened, 2, 100, scale=0.0)
    alone = Update(1, {**alone.tensors, "w.net.w": deep}, dict(alone.metadata), alone.sender)
    close(method, [*low, alone])
    assert np.linalg.norm(moved(method, before)) == pytest.approx(2 / 100, rel=1e-3)


@pytest.mark.parametrize("kind", ["ranks", "slices"])
def test_a_median_over_unequal_devices_keeps_a_minority_out(kind: str) -> None:
    rule = FedAvgSettings(robust="median", clip_multiple=0)
    method = ladder_method(WIDE, **{kind: (2,) if kind == "ranks" else ((3, 4),)}, settings=rule)
    before = method.model["net.w"].copy()
    opened = method.open_round(1)
    still = [update(opened, 1 + place % 2, place, scale=0.0) for place in range(12)]
    evil = [update(opened, 1 + place % 2, 50 + place, scale=1e6) for place in range(4)]
    close(method, [*still, *evil])
    assert np.abs(moved(method, before)).max() < 1e-6


def test_a_robust_mean_is_the_mean_where_nothing_is_trimmed() -> None:
    full = layout_of(WIDE)
    ladder = Ladder(full, [factored_rung(1, 2, WIDE, 2), Rung(full, FULL(2, 2))])
    model = np.random.default_rng(1).standard_normal(60).astype(np.float32)
    ladder = ladder.cut_by(ladder.bases_of(model))
    rng = np.random.default_rng(2)
    moves = [
        (r, rng.standard_normal(ladder.rungs[r].size).astype(np.float32)) for r in (0, 1, 0, 1)
    ]
    sums = [sum(m.astype(np.float64) for r, m in moves if r == rung) for rung in (0, 1)]
    mean = ladder.mean(lambda rung, at: sums[rung][at], [2, 2])
    np.testing.assert_allclose(ladder.robust_mean(moves, RobustRule("none")), mean, atol=1e-5)


def test_updates_of_another_rung_are_refused_by_reason() -> None:
    method = ladder_method(WIDE, ranks=(1, 2))
    opened = method.open_round(1)
    good = update(opened, 1, seed=0)
    for change, reason in (
        ({"rung": 2}, "bad-values"),  # the other rank's shapes
        ({"rung": 3}, "bad-tensors"),  # the full model has no factors
        ({"rung": 4}, "bad-metadata"),
        ({"rung": 0}, "bad-metadata"),
        ({"rung": 1.0}, "bad-metadata"),
    ):
        with pytest.raises(Refused) as refused:
            method.check(Update(1, good.tensors, {**good.metadata, **change}, sender(0)))
        assert refused.value.reason == reason, change
    without = {name: value for name, value in good.metadata.items() if name != "rung"}
    with pytest.raises(Refused, match="rung"):
        method.check(Update(1, good.tensors, without, sender(0)))
    method.check(good)


@pytest.mark.parametrize("kind", ["other", "none", "rank"])
def test_a_ladder_whose_pieces_do_not_fit_is_refused(kind: str) -> None:
    full = layout_of(WIDE)
    small = {
        "other": lambda: sliced_rung(1, 2, (3, 3), of="net.x"),
        "none": lambda: factored_rung(1, 2, WIDE, 2, of="net.b"),
        "rank": lambda: sliced_rung(1, 3, (3, 3)),
    }[kind]()
    rungs = [small, Rung(full, FULL(2, 2))]
    if kind == "rank":
        rungs.insert(1, factored_rung(2, 3, WIDE, 2))
    with pytest.raises(ValueError, match=r"net\.[xbw]"):
        Ladder(full, rungs)


@pytest.mark.parametrize("kind", ["ranks", "slices", "robust"])
def test_a_round_closes_in_the_memory_of_one_tensor(kind: str) -> None:
    side, many = 64, 60
    arrays = {f"l{n}": np.zeros((side, side), np.float32) for n in range(many)}
    small: dict[str, np.ndarray] = {}
    pieces: dict[str, Piece] = {}
    for name in arrays:
        if kind == "slices":
            small[name], pieces[name] = np.zeros((8, 8), np.float32), Piece(name)
            continue
        for role, shape in (("left", (side, 4)), ("scale", (4,)), ("right", (4, side))):
            small[f"{name}.{role}"] = np.zeros(shape, np.float32)
            pieces[f"{name}.{role}"] = Piece(name, role)
    scales = {name: small.pop(name) for name in [*small] if name.endswith(".scale")}
    held = shared_tensors(scales, {}) if scales else ()
    rungs = [
        Rung(shared_tensors(small, {}), replace(FULL(1, 2), pieces=pieces), held=held),
        Rung(shared_tensors(arrays, {}), FULL(2, 2)),
    ]
    ladder = Ladder(rungs[1].layout, rungs)
    model = np.random.default_rng(0).standard_normal(many * side**2).astype(np.float32)
    ladder = ladder.cut_by(ladder.bases_of(model))
    moves = [(at, np.ones(rung.size, np.float32)) for at, rung in enumerate(rungs)]
    tracemalloc.start()
    try:
        if kind == "robust":
            ladder.robust_mean(moves, RobustRule("median"))
        else:
            ladder.mean(lambda rung, at: moves[rung][1][at], [1, 1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * model.size + 20 * 8 * side**2  # in float64 all would be 60 of these


def test_one_rung_is_plain_averaging() -> None:
    full: tuple[SharedTensor, ...] = layout_of(WIDE)
    model = np.random.default_rng(1).standard_normal(60).astype(np.float32)
    ladder = Ladder(full, [Rung(full, FULL(1, 1))])
    sums = np.arange(60.0)
    np.testing.assert_array_equal(ladder.mean(lambda _, at: sums[at], [4]), sums / 4)
    np.testing.assert_array_equal(ladder.part(model, 0), model)
    assert ladder.basis_size == 0


def test_a_task_may_leave_rungs_of_a_ladder_out() -> None:
    rungs = [factored_rung(2, 4, WIDE, 2), Rung(layout_of(WIDE), FULL(4, 4))]
    method = FedAvgMethod(arrays_of(WIDE), {}, FedAvgSettings(), rungs=rungs)
    before = method.model["net.w"].copy()
    opened = method.open_round(1)
    assert set(opened.attachments) == {rung_name(2), rung_name(4)}
    with pytest.raises(Refused, match="rung"):
        good = update(opened, 4, seed=1)
        method.check(Update(1, good.tensors, {**good.metadata, "rung": 1}, sender(0)))
    close(method, [update(opened, 2, seed=0), update(opened, 4, seed=1)])
    assert np.abs(moved(method, before)).min() > 0


def test_momenta_of_factors_are_of_one_version_alone() -> None:
    """The next one's factors stand on other directions, and with other signs."""
    kept = FedAvgSettings(training=FedAvgTraining(optimizer_state="kept"))
    with pytest.raises(ValueError, match="momenta, which would be of other directions"):
        ladder_method(WIDE, ranks=(2,), settings=kept)
    ladder_method(WIDE, slices=((3, 4),), settings=kept)


KINDS: tuple[Slices, ...] = get_args(Slices)
MOVABLE = st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1)))


def told_to(opened: Broadcast, rung: int, who: int) -> dict[str, np.ndarray]:
    """What a device of that name trains, by its own choice among the attachments."""
    name = own_rung(opened.attachments, rung, opened.round_id, sender(who))
    assert name is not None
    return dict(opened.attachments[name].tensors)


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), size=MOVABLE, who=st.integers(0, 50), rounds=st.integers(0, 4))
def test_what_a_device_was_told_is_what_its_update_moves(
    kind: Slices, size: tuple[int, int], who: int, rounds: int
) -> None:
    """Both ends take the same slice, in each round, version and after a restart."""
    units, kept = size
    chosen = FedAvgSettings(slices=kind, deals=3, clip_multiple=0, samples_multiple=0)
    method = movable_method(units, kept, chosen)
    for number in range(1, rounds + 1):
        opened = method.open_round(number)
        tensors = {name: np.ones_like(array) for name, array in told_to(opened, 2, 1).items()}
        close(method, [Update(number, tensors, {"loss": 0.0, "samples": 1, "rung": 2}, sender(1))])
    before = method.model["net.w"]
    opened = method.open_round(rounds + 1)
    assert len(opened.attachments) == (4 if kind == "dealt" else 2)
    told = told_to(opened, 1, who)
    tensors = {name: np.ones_like(array) for name, array in told.items()}
    other = movable_method(units, kept, chosen)
    other.restore(unpack_state(pack_state(method.state())))
    sent = Update(rounds + 1, tensors, {"loss": 0.0, "samples": 1, "rung": 1}, sender(who))
    close(other, [sent])
    at = other.model["net.w"] != before
    assert at.sum() == 2 * kept * 3 * kept
    np.testing.assert_array_equal(before[at], told["w.net.w"].reshape(-1))
    np.testing.assert_allclose(other.model["net.w"][at] - before[at], 1, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_move_as_their_kind_says(kind: Slices) -> None:
    strengths = np.array([3.0, 1.0, 9.0, 2.0])
    orders = [unit_orders(kind, 4, 2, version, strengths).tolist() for version in range(3)]
    if kind == "static":
        assert orders == [[[0, 1, 2, 3]] * 2] * 3
    elif kind == "rolling":
        assert [each[0] for each in orders] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]
    elif kind == "ranked":
        assert orders == [[[2, 0, 3, 1]] * 2] * 3
    else:
        assert len({tuple(order) for each in orders for order in each}) > 3
        assert all(sorted(order) == [0, 1, 2, 3] for each in orders for order in each)


def test_the_strongest_units_are_those_with_the_largest_parameters() -> None:
    method = movable_method(3, 1, FedAvgSettings(slices="ranked"))
    model = method.model
    model["net.w"][[1, 4]] *= 0  # unit 1 of 3, in both blocks of rows
    model["net.w"][:, 0:3] *= 9
    method.begin_with(model)
    assert method.state()["orders"][0][0] == 0
    told = told_to(method.open_round(1), 1, 0)["w.net.w"]
    np.testing.assert_array_equal(told, model["net.w"][[0, 3], 0:3])


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    robust=st.sampled_from(["none", "median"]),
    fleet=st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 9)),
        min_size=4,
        max_size=9,
        unique_by=lambda one: one[1],
    ),
    shards=st.integers(1, 3),
)
def test_moving_slices_add_up_over_any_shards_to_the_same_bits(
    kind: Slices, robust: str, fleet: list[tuple[int, int]], shards: int
) -> None:
    chosen = FedAvgSettings(slices=kind, robust=robust)  # type: ignore[arg-type]

    def sent(opened: Broadcast) -> list[Update]:
        found = []
        for rung, who in fleet:
            rng = np.random.default_rng([who, rung])
            tensors = {
                name: rng.standard_normal(array.shape).astype(np.float32)
                for name, array in told_to(opened, rung, who).items()
            }
            metadata = {"loss": 0.5, "samples": 3, "rung": rung}
            found.append(Update(opened.round_id, tensors, metadata, sender(who)))
        return found

    one = movable_method(4, 2, chosen)
    close(one, sent(one.open_round(1)))
    start = one.state()
    updates = sent(one.open_round(2))
    if robust == "none":
        first = added_up_in_shards(lambda: movable_method(4, 2, chosen), start, updates, shards)
    close(one, updates)
    if robust == "none":
        for name, array in one.state().items():
            assert array.tobytes() == first.state()[name].tobytes(), name
    assert np.isfinite(one.model["net.w"]).all()


def test_a_state_whose_orders_are_none_is_refused() -> None:
    method = movable_method(3, 1, FedAvgSettings(slices="rolling"))
    state = method.state()
    with pytest.raises(RestoreError, match="orders"):
        method.restore({**state, "orders": np.array([[0, 1, 1]])})


@pytest.mark.parametrize(("rung", "least", "most"), [(0, 0.9, 1.0), (2, -1.0, 0.6)])
def test_an_update_of_a_low_rank_is_another_move_one_version_later(
    rung: int, least: float, most: float
) -> None:
    """Why ``round.late`` is refused for such ladders: the further down the ranks, the more the
    bases have turned when the model has moved by a tenth of its length."""
    method = ladder_method((24, 40), (2, 5, 11))
    ladder, model = method._ladder, method._model
    rng = np.random.default_rng(0)
    step = rng.standard_normal(model.size).astype(np.float32)
    later = model + step * np.float32(0.1 * np.linalg.norm(model) / np.linalg.norm(step))
    sent = {
        one.wire_name: rng.standard_normal(one.wire_shape).astype(np.float32)
        for one in ladder.rungs[rung].layout
        if one.name != "net.b"
    }
    moves = []
    for whole in (model, later):
        cut = ladder.cut_by(ladder.bases_of(whole))
        parts = [
            cut.moved(piece, sent.get(one.wire_name, np.zeros(one.wire_shape))).reshape(-1)
            for one, piece in zip(cut.rungs[rung].layout, cut.rungs[rung].pieces, strict=True)
        ]
        values = np.concatenate(parts).astype(np.float64)
        weights = [int(place == rung) for place in range(len(cut.rungs))]
        moves.append(cut.mean(lambda _, at, own=values: own[at], weights))  # type: ignore[misc]
    cosine = moves[0] @ moves[1] / np.linalg.norm(moves[0]) / np.linalg.norm(moves[1])
    assert least < cosine <= most
