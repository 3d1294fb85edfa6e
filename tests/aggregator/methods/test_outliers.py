"""What no honest device would send is left out; what honest devices send is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.limits import Outliers
from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 40, 8
PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)


def values(seed: int, scale: float = 1.0, rows: int = 20, columns: int = 4) -> Any:
    found = scale * np.random.default_rng(seed).standard_normal((rows, columns))
    return found.astype(np.float32)


def settled(multiple: float = 3.0, updates: int = 40) -> Outliers:
    found = Outliers(multiple)
    assert not any(found.holds(values(seed)) for seed in range(updates))
    return found


def test_an_update_far_too_large_is_an_outlier() -> None:
    one = settled()
    assert one.holds(values(50, -10.0))
    assert not one.holds(values(51, 2.0))
    assert not one.holds(values(52, 0.01)), "a small update harms nobody"
    assert one.count == 1


def test_a_minority_does_not_choose_what_is_usual() -> None:
    one = settled()
    for seed in range(300):
        hostile = seed % 5 < 2
        assert one.holds(values(seed, 1e6 if hostile else 1.0)) == hostile


def test_a_row_out_of_proportion_makes_an_outlier_of_any_size() -> None:
    for scale in (1e-3, 1.0):
        one, lopsided = settled(), values(50, scale)
        assert not one.holds(lopsided)
        lopsided[3] *= 10 * np.linalg.norm(lopsided, axis=1).max() / np.linalg.norm(lopsided[3])
        assert one.holds(lopsided)


def test_few_rows_may_differ_as_they_like() -> None:
    one, pair = settled(), values(50, rows=2)
    pair[0] *= 1e-6
    assert not one.holds(pair), "one row of two is at most twice their mean"


def test_updates_of_many_columns_may_all_be_larger_than_the_others() -> None:
    one = Outliers(3.0)
    for seed in range(200):
        columns = 64 if seed % 4 == 0 else 8
        found = one.holds(values(seed, 10.0 if columns == 64 else 1.0, columns=columns))
        # Until there are 32 of them, they are measured by the fleet as a whole.
        assert found == (columns == 64 and 0 < seed < 31 * 4), seed
    assert one.holds(values(500, 10.0, columns=8))
    assert not one.holds(values(501, 10.0, columns=100))


def test_a_class_of_ones_own_does_not_lift_the_limit() -> None:
    one = settled(updates=200)
    kept = [one.holds(values(seed, 10.0, columns=1)) for seed in range(31)]
    assert all(kept), "a class needs 32 updates"
    for seed in range(60):
        one.holds(values(seed, 1e6, columns=1))
    assert one.holds(values(99, 1e6, columns=1)), "no class is 16 times as large as the fleet"


def test_nothing_and_zeros_are_no_outliers() -> None:
    one = settled()
    before = one.state()["recent"].tobytes()
    for empty in (np.empty((0, 4), np.float32), np.zeros((3, 4), np.float32)):
        assert not one.holds(empty)
    assert one.state()["recent"].tobytes() == before


def test_the_window_follows_when_all_updates_change() -> None:
    one = settled(updates=300)
    assert len(one.state()["recent"]) == 256
    found = [one.holds(values(seed, 100.0)) for seed in range(200)]
    assert found[0] and not found[-1]


def test_a_round_that_was_given_up_is_forgotten() -> None:
    one = settled()
    one.settle()
    before = one.state()["settled"].tobytes()
    one.holds(values(50, 10.0))
    one.begin()
    state = one.state()
    assert (state["settled"].tobytes(), state["recent"].tobytes()) == (before, before)
    assert one.count == 0


def test_a_state_continues_bit_for_bit() -> None:
    one = settled(updates=100)
    one.settle()
    one.holds(values(101, 50.0))
    other = Outliers(3.0).restored(one.state())
    assert other.count == one.count == 1
    for seed in range(300):
        scale = 1.0 + 9.0 * (seed % 7 == 0)
        assert one.holds(values(seed, scale)) == other.holds(values(seed, scale))
    assert {n: a.tobytes() for n, a in one.state().items()} == {
        n: a.tobytes() for n, a in other.state().items()
    }
    assert Outliers(3.0).restored({}).count == 0


def test_states_that_do_not_fit_are_refused() -> None:
    good = settled(updates=3).state()
    for bad in (
        {"recent": good["recent"]},
        {**good, "recent": good["recent"][:, :2]},
        {**good, "recent": good["recent"].astype(np.float32)},
        {**good, "settled": np.ones((257, 3))},
        {**good, "settled": -good["recent"]},
        {**good, "settled": np.full((1, 3), np.nan)},
        {**good, "count": np.asarray(-1, dtype=np.int64)},
        {**good, "count": np.asarray(1.0)},
    ):
        with pytest.raises(RestoreError):
            Outliers(3.0).restored(bad)


def update(round_id: int, seed: int, scale: float = 1.0) -> Update:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(ITEMS, size=20, replace=False))
    columns = np.sort(rng.choice(K, size=4, replace=False))
    tensors = {"rows": rows, "columns": columns, "values": values(seed, scale)}
    return Update(round_id, tensors)


@pytest.mark.parametrize("robust", ["none", "median"])
def test_an_outlier_moves_nothing_and_takes_part(robust: Any) -> None:
    chosen = ScatterSettings(
        aggregator="mean", optimizer=PLAIN, robust=robust, outlier_multiple=3.0, row_multiple=100.0
    )
    first = np.zeros((ITEMS, K), dtype=np.float32)
    attacked, quiet = ScatterMethod(first, chosen), ScatterMethod(first, chosen)
    hostile = update(1, 99, -10.0)
    nothing = {"rows": np.empty(0, np.int64), "values": np.empty((0, 4), np.float32)}
    for one in (attacked, quiet):
        one.open_round(1)
        for seed in range(10):
            one.absorb(update(1, seed))
    attacked.absorb(hostile)
    quiet.absorb(Update(1, {**hostile.tensors, **nothing}))
    summaries = [one.close_round() for one in (attacked, quiet)]
    assert [one.metrics["outliers"] for one in summaries] == [1.0, 0.0]
    assert [one.participants for one in summaries] == [11, 11]
    assert attacked.items.tobytes() == quiet.items.tobytes()
    assert attacked.items.any()


def difference(round_id: int, seed: int, scale: float = 1.0, samples: int = 10) -> Update:
    return Update(round_id, {"w.w": values(seed, scale)}, {"loss": abs(scale), "samples": samples})


@pytest.mark.parametrize("robust", ["none", "trimmed", "median"])
def test_averaging_leaves_out_an_update_far_too_large(robust: Any) -> None:
    first = {"w": np.zeros((20, 4), dtype=np.float32)}
    chosen = FedAvgSettings(robust=robust, outlier_multiple=3.0)
    attacked, quiet = FedAvgMethod(first, {}, chosen), FedAvgMethod(first, {}, chosen)
    for one in (attacked, quiet):
        one.open_round(1)
        for seed in range(10):
            one.absorb(difference(1, seed))
    attacked.absorb(difference(1, 99, -10.0, samples=10**6))
    attacked.absorb(difference(1, 5, 2.5))
    quiet.absorb(difference(1, 5, 2.5))
    summaries = [one.close_round() for one in (attacked, quiet)]
    assert [one.metrics["outliers"] for one in summaries] == [1.0, 0.0]
    assert [one.participants for one in summaries] == [12, 11]
    assert summaries[0].metrics["weight"] == summaries[1].metrics["weight"]
    assert attacked.model["w"].tobytes() == quiet.model["w"].tobytes()
    assert attacked.model["w"].any()


@pytest.mark.parametrize("robust", ["none", "median"])
def test_averaging_follows_a_fleet_whose_updates_all_grow(robust: Any) -> None:
    chosen = FedAvgSettings(robust=robust, outlier_multiple=3.0)
    one = FedAvgMethod({"w": np.zeros((20, 4), dtype=np.float32)}, {}, chosen)
    left_out = []
    for round_id in range(1, 40):
        one.open_round(round_id)
        for seed in range(10):
            one.absorb(difference(round_id, seed, 1.0 if round_id < 20 else 100.0))
        summary = one.close_round()
        assert (summary.participants, summary.version) == (10, round_id)
        left_out.append(summary.metrics["outliers"])
    # Rounds without anything that is kept count, so the window goes on.
    assert left_out[18:20] == [0.0, 10.0]
    assert left_out[-1] == 0.0


def test_an_honest_fleet_is_left_as_it_is() -> None:
    found = []
    for multiple in (0.0, 3.0):
        one = ScatterMethod(
            np.zeros((ITEMS, K), dtype=np.float32), ScatterSettings(outlier_multiple=multiple)
        )
        for round_id in range(1, 5):
            one.open_round(round_id)
            for seed in range(30):
                one.absorb(update(round_id, 30 * round_id + seed))
            one.close_round()
        found.append(one.items.tobytes())
    assert found[0] == found[1]
