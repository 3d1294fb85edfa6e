"""What no honest device would send is left out; what honest devices send is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.fleet import Outliers, measured
from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 40, 8
PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)


def values(seed: int, scale: float = 1.0, rows: int = 20, columns: int = 4) -> Any:
    found = scale * np.random.default_rng(seed).standard_normal((rows, columns))
    return found.astype(np.float32)


def settled(multiple: float = 3.0, updates: int = 40) -> Outliers:
    found = Outliers(multiple)
    heard(found, [values(seed) for seed in range(updates)])
    assert not any(holds(found, values(seed)) for seed in range(updates))
    return found


def heard(one: Outliers, sent: list[Any], round_id: int = 1) -> None:
    """A round of these updates, after which the next one opens."""
    one.begin(round_id)
    for each in sent:
        one.note("", measured(each))
    one.settle()
    one.begin(round_id + 1)


def holds(one: Outliers, sent: Any) -> bool:
    return one.holds(measured(sent))


def test_an_update_far_too_large_is_an_outlier() -> None:
    one = settled()
    assert holds(one, values(50, -10.0))
    assert not holds(one, values(51, 2.0))
    assert not holds(one, values(52, 0.01)), "a small update harms nobody"
    assert one.count == 1


def test_while_the_fleet_is_not_known_none_is_one() -> None:
    one = Outliers(3.0)
    heard(one, [values(0), values(1)])
    assert not one.known and not holds(one, values(50, 1e6))
    one.note("", measured(values(2)))
    one.look_again()
    assert one.known and holds(one, values(50, 1e6))


def test_a_minority_does_not_choose_what_is_usual() -> None:
    one = Outliers(3.0)
    sent = [values(seed, 1e6 if seed % 5 < 2 else 1.0) for seed in range(250)]
    heard(one, sent)
    assert [holds(one, each) for each in sent] == [seed % 5 < 2 for seed in range(250)]


def test_what_comes_in_a_round_is_judged_by_what_came_before_it() -> None:
    one = settled()
    for seed in range(300):
        one.note("", measured(values(seed, 1e6)))
    assert holds(one, values(7, 1e6)) and not holds(one, values(7))


def test_a_row_out_of_proportion_makes_an_outlier_of_any_size() -> None:
    for scale in (1e-3, 1.0):
        one, lopsided = settled(), values(50, scale)
        assert not holds(one, lopsided)
        lopsided[3] *= 10 * np.linalg.norm(lopsided, axis=1).max() / np.linalg.norm(lopsided[3])
        assert holds(one, lopsided)


def test_few_rows_may_differ_as_they_like() -> None:
    one, pair = settled(), values(50, rows=2)
    pair[0] *= 1e-6
    assert not holds(one, pair), "one row of two is at most twice their mean"


def wide(seed: int) -> Any:
    return values(seed, 10.0, columns=64)


def test_all_are_measured_by_the_columns_that_are_ahead() -> None:
    one = Outliers(3.0)
    heard(one, [wide(seed) if seed % 4 == 0 else values(seed, columns=8) for seed in range(120)])
    assert holds(one, wide(500)), "30 of them are measured by the fleet as a whole"
    heard(one, [wide(seed) if seed % 4 == 0 else values(seed, columns=8) for seed in range(200)], 2)
    assert not holds(one, wide(500))
    assert not holds(one, values(500, 10.0, columns=8)), "these may follow in the next round"
    assert not holds(one, values(501, 10.0, columns=100))
    assert holds(one, values(500, 40.0, columns=8))


def test_a_class_that_lags_behind_lowers_no_limit() -> None:
    one = Outliers(3.0)
    heard(one, [values(seed, 0.1 if seed % 4 else 1.0) for seed in range(40)])
    heard(one, [values(seed, 1.0 if seed % 4 else 0.1, columns=8) for seed in range(200)], 2)
    assert not any(holds(one, values(seed, columns=k)) for k in (4, 8, 64) for seed in range(20))


def test_a_quarter_of_the_fleet_lifts_the_limit_sixteen_fold_at_most() -> None:
    one = Outliers(3.0)
    claims = [values(seed, 1e6 * 10**k, columns=1 << k) for k in range(2) for seed in range(32)]
    heard(one, [*(values(seed) for seed in range(192)), *claims])
    assert not any(holds(one, values(seed, 16.0)) for seed in range(20))
    assert all(holds(one, values(seed, 160.0, columns=k)) for k in (1, 4) for seed in range(20))


def test_a_class_of_ones_own_does_not_lift_the_limit() -> None:
    fleet = [values(seed) for seed in range(200)]
    one = Outliers(3.0)
    heard(one, [*fleet, *(values(seed, 10.0, columns=1) for seed in range(31))])
    assert holds(one, values(99, 10.0, columns=1)), "a class needs 32 updates"
    heard(one, [*fleet, *(values(seed, 1e6, columns=1) for seed in range(56))], 2)
    assert holds(one, values(99, 1e6, columns=1)), "no class is 16 times as large as the fleet"


def update(round_id: int, seed: int, scale: float = 1.0) -> Update:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(ITEMS, size=20, replace=False))
    columns = np.sort(rng.choice(K, size=4, replace=False))
    tensors = {"rows": rows, "columns": columns, "values": values(seed, scale)}
    return Update(round_id, tensors)


@pytest.mark.parametrize("robust", ["none", "median"])
def test_an_outlier_moves_nothing_and_takes_part(robust: Any) -> None:
    chosen = ScatterSettings(
        "bpr",
        aggregator="mean",
        optimizer=PLAIN,
        robust=robust,
        outlier_multiple=3.0,
        row_multiple=100.0,
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
    # A round that is held is judged by itself. One that adds up is judged by those before it, which
    # count though nothing of them is kept.
    assert left_out[18:21] == [0.0, 10.0 if robust == "none" else 0.0, 0.0]
    assert left_out[-1] == 0.0


def test_an_honest_fleet_is_left_as_it_is() -> None:
    found = []
    for multiple in (0.0, 3.0):
        one = ScatterMethod(
            np.zeros((ITEMS, K), dtype=np.float32),
            ScatterSettings("bpr", outlier_multiple=multiple),
        )
        for round_id in range(1, 5):
            one.open_round(round_id)
            for seed in range(30):
                one.absorb(update(round_id, 30 * round_id + seed))
            one.close_round()
        found.append(one.items.tobytes())
    assert found[0] == found[1]
