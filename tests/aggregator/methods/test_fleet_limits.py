"""Limits that follow the fleet, from a task's first update on: one device is one voice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.fleet import FleetScale, measured
from aggregator.methods.robust import HeldUpdates, LastUpdates
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 40, 8
PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)
NAMES = [f"{place:032x}" for place in range(300)]


def heard(one: FleetScale, notes: list[tuple[str, Any]], round_id: int) -> None:
    """A round of these, after which the next one opens."""
    one.begin(round_id)
    for sender, values in notes:
        one.note(sender, values)
    one.settle()
    one.begin(round_id + 1)


def test_a_median_is_over_256_devices_and_each_is_one_voice() -> None:
    scale = FleetScale(2)
    assert (scale.known, scale.median(0)) == (False, 0.0)
    noted = [(name, (norm, 10 * norm)) for name, norm in zip(NAMES, (3.0, 1.0, 2.0), strict=False)]
    heard(scale, noted, 1)
    assert (scale.known, scale.median(0), scale.median(1)) == (True, 2.0, 20.0)
    # One that comes in every round says no more than its last word.
    for number in range(2, 100):
        heard(scale, [(NAMES[0], (100.0 + number, 0.0))], number)
    assert (scale.median(0), scale.median(1)) == (2.0, 10.0)
    heard(scale, [(name, (5.0, 5.0)) for name in NAMES[:300]], 100)
    assert scale.median(0) == 5.0
    heard(scale, [(name, (7.0, 5.0)) for name in NAMES[:200]], 101)
    assert scale.median(0) == 7.0, "earlier voices stay where a round has fewer than 256"
    assert len(scale.state()["settled.names"]) == 256


def test_nothing_of_a_round_changes_how_it_is_judged() -> None:
    scale = FleetScale(1)
    heard(scale, [(name, (1.0,)) for name in NAMES[:9]], 1)
    for name in NAMES:
        scale.note(name, (1e9,))
    assert scale.median(0) == 1.0
    scale.look_again()
    assert scale.median(0) == 1e9, "unless all of the round was held"
    scale.begin(3)
    assert scale.median(0) == 1.0, "and it leaves no trace where it is given up"


def test_updates_without_a_sender_are_voices_of_their_own() -> None:
    scale = FleetScale(1)
    heard(scale, [("", (norm,)) for norm in (1.0, 2.0, 100.0, 7.0)], 1)
    assert scale.median(0) == 2.0, "the lower of two in the middle"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e12]),
    st.booleans(),
)
def test_an_update_is_measured_as_its_definition_says_to_the_last_bit(
    rows: int, columns: int, seed: int, scale: float, equal: bool
) -> None:
    rng = np.random.default_rng(seed)
    values = (scale * rng.standard_normal((rows, columns))).astype(np.float32)
    if equal and rows:
        values[rng.integers(0, rows, rows)] = values[0]
    found = measured(values)
    squares = np.einsum("ij,ij->i", values, values)
    assert found.squares.tobytes() == squares.tobytes()
    assert found.norm == math.sqrt(float(squares.sum(dtype=np.float64)))
    middle = (rows - 1) // 2
    median = float(np.partition(squares, middle)[middle]) if rows else 0.0
    assert found.median_row == math.sqrt(median / columns)
    assert found.largest_row == math.sqrt((float(squares.max()) if rows else 0.0) / columns)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1e9))), max_size=8))
def test_a_median_is_that_of_the_latest_voices(rounds: list[list[tuple[int, float]]]) -> None:
    scale, latest = FleetScale(1), {}
    for number, notes in enumerate(rounds, 1):
        heard(scale, [(NAMES[sender], (value,)) for sender, value in notes], number)
        own: dict[int, float] = {}
        for sender, value in notes:
            own[sender] = max(value, own.get(sender, 0.0))
        latest |= own
        ordered = sorted(latest.values())
        assert scale.median(0) == (ordered[(len(ordered) - 1) // 2] if ordered else 0.0)
        assert scale.known == (len(ordered) >= 3)


def test_updates_that_are_held_are_kept_whole() -> None:
    held = HeldUpdates()
    tensors = {"a": np.ones(2, np.float32), "a.b": np.zeros((2, 0), np.int64)}
    one = Update(3, tensors, {"samples": 7, "loss": 0.5}, NAMES[1])
    held.add(one)
    tensors = {"a": np.zeros(0, np.float32), "a.b": np.asarray([[5]])}
    held.add(Update(4, tensors, {"samples": 1 << 40, "loss": 1e12}))
    again = HeldUpdates().restored(unpack_state(pack_state(held.state())))
    assert (len(again), again.nbytes) == (2, held.nbytes) == (2, 16)
    first, second = again
    assert (first.round_id, dict(first.metadata), first.sender) == (3, dict(one.metadata), NAMES[1])
    assert type(first.metadata["samples"]) is int
    assert first.tensors["a"].tobytes() == one.tensors["a"].tobytes()
    assert (second.round_id, second.sender) == (4, "")
    assert second.tensors["a.b"].tolist() == [[5]] and second.metadata["samples"] == 1 << 40
    good = held.state()
    flat = "a|float32|1"
    for bad in (
        {name: array for name, array in good.items() if name != "said"},
        {**good, f"values.{flat}": good[f"values.{flat}"][1:]},
        {**good, f"values.{flat}": good[f"values.{flat}"][None]},
        {**good, f"values.{flat}": good[f"values.{flat}"].astype(np.float16)},
        {**good, f"shapes.{flat}": -good[f"shapes.{flat}"]},
        {**good, f"shapes.{flat}": good[f"shapes.{flat}"][:1]},
        {**good, f"places.{flat}": good[f"places.{flat}"][:1]},
        {**good, f"places.{flat}": good[f"places.{flat}"] + 1},
        {**good, f"places.{flat}": good[f"places.{flat}"] * 0},
        {**good, "shapes.c": good[f"shapes.{flat}"]},
        {**good, "values.c": good[f"values.{flat}"]},
        {**good, "said": good["said"][:-1]},
        {**good, "said": np.frombuffer(b"[3, 4]", np.uint8)},
        {**good, "said": np.frombuffer(b"[{}]", np.uint8)},
        {**good, "said": np.frombuffer(b'[[3, "", {"loss": NaN}], [4, "", {}]]', np.uint8)},
        {**good, "said": np.frombuffer(b'[[3, "no sender", {}], [4, "", {}]]', np.uint8)},
        {**good, "more": np.zeros(2)},
        {**good, "more.b": np.zeros(2)},
    ):
        with pytest.raises(RestoreError):
            HeldUpdates().restored(bad)
    assert len(HeldUpdates().restored(HeldUpdates().state())) == 0
    once, twice = LastUpdates(), HeldUpdates()
    for each in (one, Update(5, {"b": np.ones(1, np.float32)}, {}, NAMES[1])):
        once.put(each)
        twice.add(each)
    (last,) = LastUpdates().restored(unpack_state(pack_state(once.state())))
    assert (last.round_id, last.sender, last.tensors.keys()) == (5, NAMES[1], {"b"})
    with pytest.raises(RestoreError, match="twice"):
        LastUpdates().restored(twice.state())


def scatter_update(round_id: int, place: int, scale: float, seed: int = 0) -> Update:
    rng = np.random.default_rng([seed, round_id, place])
    rows = np.sort(rng.choice(ITEMS, size=20, replace=False))
    values = scale * rng.standard_normal((20, K))
    tensors = {"rows": rows, "columns": np.arange(K), "values": values.astype(np.float32)}
    return Update(round_id, tensors, sender=NAMES[place])


def averaging_update(
    round_id: int, place: int, scale: float, samples: int = 40, buffers: float = 0.1
) -> Update:
    rng = np.random.default_rng([round_id, place])
    values = scale * rng.standard_normal((ITEMS, K))
    moved = buffers * rng.standard_normal(K)
    tensors = {"w.w": values.astype(np.float32), "b.bn.running_var": moved.astype(np.float32)}
    return Update(round_id, tensors, {"samples": samples, "loss": 0.5}, NAMES[place])


def scatter(**chosen: Any) -> ScatterMethod:
    first = initial_items(ITEMS, K, 0.1, np.random.default_rng(0))
    return ScatterMethod(first, ScatterSettings("bpr", **chosen))


def averaging(**chosen: Any) -> FedAvgMethod:
    first = np.random.default_rng(0).standard_normal((ITEMS, K)).astype(np.float32)
    variances = {"bn.running_var": np.ones(K, np.float32)}
    return FedAvgMethod({"w": first}, variances, FedAvgSettings(**chosen))


def absorbed(one: Any, updates: list[Update]) -> Any:
    for each in updates:
        one.check(each)
        one.absorb(each)
    return one.close_round()


finite = st.one_of(
    st.floats(1e-30, 1e12),
    st.floats(-1e12, -1e-30),
    st.sampled_from([1e12, -1e12, 1e-38, 1e-3, 1e3, 1e11]),
)


@st.composite
def hostile_values(draw: st.DrawFn) -> np.ndarray:
    """Any finite values: of one size all over, in one row, or in a few places."""
    values = np.zeros((ITEMS, K), np.float32)
    shape = draw(st.sampled_from(["all", "row", "places", "sizes"]))
    if shape == "all":
        values[:] = draw(finite)
    elif shape == "row":
        values[draw(st.integers(0, ITEMS - 1))] = draw(finite)
    elif shape == "places":
        for _ in range(draw(st.integers(1, 5))):
            values[draw(st.integers(0, ITEMS - 1)), draw(st.integers(0, K - 1))] = draw(finite)
    else:
        exponents = np.random.default_rng(draw(st.integers(0, 99))).uniform(-38, 12, values.shape)
        values[:] = 10.0**exponents
    return values


@settings(max_examples=80, deadline=None)
@given(hostile_values(), st.integers(2, 12), st.data())
def test_whatever_one_of_a_few_sends_moves_scatter_by_four_honest_shares(
    values: np.ndarray, honest: int, data: st.DataObject
) -> None:
    """In the first round of a task, and wherever in the order of the commits it comes."""
    one = scatter(optimizer=PLAIN, aggregator="mean")
    before = one.open_round(1).tensors["items"]
    good = [scatter_update(1, place, 0.1) for place in range(1, honest + 1)]
    tensors = {"rows": np.arange(ITEMS), "columns": np.arange(K), "values": values}
    place = data.draw(st.integers(0, honest))
    updates = [*good[:place], Update(1, tensors, sender=NAMES[0]), *good[place:]]
    absorbed(one, updates)
    quiet = np.zeros((ITEMS, K))
    for each in good:
        quiet[each.tensors["rows"]] += each.tensors["values"]
    # What is left when the honest devices' own sum is taken out is the hostile one's.
    left = (one.items - before) * (honest + 1) + quiet
    largest = max(float(np.linalg.norm(each.tensors["values"])) for each in good)
    assert float(np.linalg.norm(left)) <= 4 * largest * 1.001


@settings(max_examples=80, deadline=None)
@given(
    hostile_values(),
    st.integers(1, 1 << 40),
    st.floats(-1e12, 1e12),
    st.integers(2, 12),
    st.data(),
)
def test_whatever_one_of_a_few_sends_moves_an_average_by_three_honest_shares(
    values: np.ndarray, claim: int, buffers: float, honest: int, data: st.DataObject
) -> None:
    one = averaging()
    before = one.model
    one.open_round(1)
    good = [averaging_update(1, place, 0.1) for place in range(1, honest + 1)]
    tensors = {"w.w": values, "b.bn.running_var": np.full(K, buffers, np.float32)}
    hostile = Update(1, tensors, {"samples": claim, "loss": 1e12}, NAMES[0])
    place = data.draw(st.integers(0, honest))
    summary = absorbed(one, [*good[:place], hostile, *good[place:]])
    moved = {name: one.model[name] - before[name] for name in before}
    weight = summary.metrics["weight"]
    assert weight <= 40 * (honest + 3)
    for wire, name in (("w.w", "w"), ("b.bn.running_var", "bn.running_var")):
        own = sum(40 * each.tensors[wire].astype(np.float64) for each in good)
        left = float(np.linalg.norm(moved[name] * weight - own.reshape(moved[name].shape)))
        largest = max(float(np.linalg.norm(each.tensors[wire])) for each in good)
        # Three norms at the usual weight; buffers do not shrink with the weight.
        assert left <= (3 if wire == "w.w" else 9) * 40 * largest * 1.001 + 0.01
    assert (one.model["bn.running_var"] >= 0).all()


def test_one_update_does_not_freeze_training_under_adam() -> None:
    """The second moment is of gradients that are bounded, so that steps stay as large as before."""

    def steps(value: float, rounds: int = 60) -> list[float]:
        one = scatter()
        moved = []
        for number in range(1, rounds + 1):
            before = one.open_round(number).tensors["items"]
            updates = [scatter_update(number, place, 0.1, 5) for place in range(1, 21)]
            if value and number == 10:
                tensors = {"rows": np.arange(ITEMS), "columns": np.arange(K)}
                values = np.full((ITEMS, K), value, np.float32)
                updates.insert(3, Update(number, {**tensors, "values": values}, sender=NAMES[0]))
            absorbed(one, updates)
            moved.append(float(np.abs(one.items - before).mean()))
        return moved

    quiet = steps(0.0)
    for value in (1e3, 1e12):
        attacked = steps(value)
        for first, last in ((9, 10), (10, 20), (20, 60)):
            assert np.mean(attacked[first:last]) > 0.5 * np.mean(quiet[first:last])
            assert np.mean(attacked[first:last]) < 2 * np.mean(quiet[first:last])


def test_one_update_does_not_freeze_an_adaptive_average() -> None:
    def steps(value: float) -> list[float]:
        adam = OptimizerSettings(name="adam", learning_rate=0.01, beta1=0.9, epsilon=1e-6)
        one = averaging(optimizer=adam)
        moved = []
        for number in range(1, 41):
            before = one.model["w"]
            one.open_round(number)
            updates = [averaging_update(number, place, 0.1) for place in range(1, 11)]
            if value and number == 10:
                hostile = averaging_update(number, 0, value, samples=1 << 40)
                updates.insert(0, hostile)
            absorbed(one, updates)
            moved.append(float(np.abs(one.model["w"] - before).mean()))
        return moved

    quiet = steps(0.0)
    for value in (1e3, 1e11):
        attacked = steps(value)
        assert np.mean(attacked[10:20]) > 0.5 * np.mean(quiet[10:20])
        assert np.mean(attacked[20:]) > 0.5 * np.mean(quiet[20:])


@pytest.mark.parametrize("kind", ["scatter", "averaging"])
def test_many_rounds_in_a_row_buy_no_second_voice(kind: str) -> None:
    one: Any = scatter(optimizer=PLAIN, aggregator="mean") if kind == "scatter" else averaging()
    make: Any = scatter_update if kind == "scatter" else averaging_update
    number = 1
    one.open_round(number)
    absorbed(one, [make(number, place, 0.1) for place in range(1, 6)])
    before = one.items if kind == "scatter" else one.model["w"]
    for number in range(2, 42):
        one.open_round(number)
        absorbed(one, [make(number, 0, 10.0 ** min(number, 10))])
    after = one.items if kind == "scatter" else one.model["w"]
    honest = float(
        np.linalg.norm(
            next(iter([make(1, 1, 0.1)])).tensors["values" if kind == "scatter" else "w.w"]
        )
    )
    assert float(np.linalg.norm(after - before)) < 40 * 4 * 1.3 * honest


@pytest.mark.parametrize("kind", ["scatter", "averaging"])
def test_a_fleet_of_two_is_held_to_the_first_model_s_length(kind: str) -> None:
    one: Any = scatter(optimizer=PLAIN, aggregator="mean") if kind == "scatter" else averaging()
    make: Any = scatter_update if kind == "scatter" else averaging_update
    before = one.items if kind == "scatter" else one.model["w"]
    for number in range(1, 6):
        one.open_round(number)
        absorbed(one, [make(number, 0, 1e9), make(number, 1, 0.01)])
    after = one.items if kind == "scatter" else one.model["w"]
    moved, length = np.linalg.norm(after - before), np.linalg.norm(before)
    assert moved <= 5 * 10 * max(float(length), 1.0)
    # Whose norms nobody can be compared with are honest ones, as a rule: those are left alone.
    small: Any = scatter(optimizer=PLAIN) if kind == "scatter" else averaging()
    small.open_round(1)
    assert absorbed(small, [make(1, 0, 0.1), make(1, 1, 0.1)]).metrics["clipped"] == 0


def test_a_claim_counts_for_three_usual_ones_and_no_more() -> None:
    one = averaging()
    one.open_round(1)
    honest = [averaging_update(1, place, 0.1) for place in range(1, 5)]
    summary = absorbed(one, [averaging_update(1, 0, 0.1, samples=1 << 40), *honest])
    assert summary.metrics["weight"] == 40 * 4 + 120
    uneven = averaging(samples_multiple=0.0, clip_multiple=0.0)
    uneven.open_round(1)
    assert (
        absorbed(uneven, [averaging_update(1, 0, 0.1, samples=4000), *honest]).metrics["weight"]
        == 4160
    )


def test_a_variance_never_falls_below_zero() -> None:
    one = averaging(clip_multiple=0.0)
    for number in range(1, 4):
        one.open_round(number)
        absorbed(
            one,
            [averaging_update(number, place, 0.1, buffers=0.0) for place in range(1, 4)]
            + [averaging_update(number, 0, 0.1, buffers=-1e3)],
        )
        found = one.model["bn.running_var"]
        assert (found >= 0).all()
    assert math.isfinite(float(found.max()))


def test_limits_may_be_turned_off_and_on_between_rounds() -> None:
    chosen = ScatterSettings("bpr", optimizer=PLAIN)
    first = initial_items(ITEMS, K, 0.1, np.random.default_rng(0))
    one = ScatterMethod(first, chosen)
    one.open_round(1)
    absorbed(one, [scatter_update(1, place, 0.1) for place in range(4)])
    off = ScatterMethod(first, replace(chosen, clip_multiple=0.0))
    off.restore(one.state())
    off.open_round(2)
    assert absorbed(off, [scatter_update(2, 0, 50.0)]).metrics["clipped"] == 0
    one.restore(off.state())
    one.open_round(3)
    assert absorbed(one, [scatter_update(3, place, 0.1) for place in range(4)]).version == 3
