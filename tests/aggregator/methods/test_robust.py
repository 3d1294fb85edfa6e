"""Robust means against plain definitions; limits that follow the fleet; states bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aggregator.methods.robust as robust_held
from aggregator.errors import TaskError
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.fleet import bounded_rows, measured
from aggregator.methods.method import Refused
from aggregator.methods.robust import RobustRule, touched_means, touched_sums
from aggregator.methods.scatter import ScatterBinding, ScatterMethod, ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.task.file import read_task
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update

ITEMS, K = 9, 4
PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)
RULES = (RobustRule(), RobustRule("trimmed", 0.25), RobustRule("median"))
floats = st.floats(-1e3, 1e3, width=32)


def expected_mean(values: list[float], rule: RobustRule) -> float:
    ordered = sorted(np.float64(value) for value in values)
    cut = int(rule.trim_share * len(ordered) + 1e-9) if rule.robust == "trimmed" else 0
    if rule.robust == "median":
        return float(np.median(ordered))
    return float(np.mean(ordered[cut : len(ordered) - cut]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), floats), max_size=40), st.sampled_from(RULES))
def test_a_cell_has_the_robust_mean_of_those_who_touched_it(
    entries: list[tuple[int, float]], rule: RobustRule
) -> None:
    cells = np.asarray([cell for cell, _ in entries], dtype=np.int64)
    values = np.asarray([value for _, value in entries], dtype=np.float32)
    found = touched_sums(cells, values, 6, rule)
    for cell in range(6):
        own = [value for at, value in entries if at == cell]
        wanted = expected_mean(own, rule) * len(own) if own else 0.0
        assert found[cell] == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    shuffled = np.random.default_rng(0).permutation(len(entries))
    again = touched_sums(cells[shuffled], values[shuffled], 6, rule)
    assert again.tobytes() == found.tobytes()


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=floats),
    st.sampled_from(RULES),
)
def test_dense_means_are_taken_coordinate_by_coordinate(
    vectors: np.ndarray, rule: RobustRule
) -> None:
    wanted = [expected_mean(list(column), rule) for column in vectors.T]
    np.testing.assert_allclose(rule.mean(vectors), wanted, rtol=1e-5, atol=1e-5)


def test_a_trimmed_tenth_of_ten_is_one() -> None:
    assert RobustRule("trimmed", 0.1).cut(np.asarray([1, 9, 10, 29, 30])).tolist() == [
        0,
        0,
        1,
        2,
        3,
    ]
    assert RobustRule("median").cut(np.asarray([1, 2, 3, 4])).tolist() == [0, 0, 1, 1]


def test_rows_are_bounded_by_size_whatever_their_number_of_columns() -> None:
    values = np.asarray([[3, 3, 3, 3], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=np.float32)
    np.testing.assert_allclose(measured(values).rows, [3, 1, 0])
    np.testing.assert_allclose(measured(values[:, :1]).rows, [3, 1, 0])
    bounded, count = bounded_rows(values, measured(values).rows, 2.0)
    assert count == 1
    np.testing.assert_allclose(bounded, [[2] * 4, [1] * 4, [0] * 4])


def scatter(chosen: ScatterSettings) -> ScatterMethod:
    return ScatterMethod(np.zeros((ITEMS, K), dtype=np.float32), chosen)


def scatter_update(round_id: int, seed: int, scale: float = 1.0) -> Update:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(ITEMS, size=int(rng.integers(1, ITEMS)), replace=False))
    columns = np.sort(rng.choice(K, size=int(rng.integers(1, K + 1)), replace=False))
    values = scale * rng.standard_normal((len(rows), len(columns)))
    tensors = {"rows": rows, "columns": columns, "values": values.astype(np.float32)}
    return Update(round_id, tensors)


def fedavg(chosen: FedAvgSettings) -> FedAvgMethod:
    return FedAvgMethod({"w": np.zeros((2, 3), np.float32)}, {}, chosen)


def fedavg_update(round_id: int, seed: int, scale: float = 1.0, samples: int = 10) -> Update:
    values = scale * np.random.default_rng(seed).standard_normal((2, 3))
    return Update(round_id, {"w.w": values.astype(np.float32)}, {"loss": 0.5, "samples": samples})


def one_row(value: float, device: int = 0) -> Update:
    whole = np.arange(K, dtype=np.int64)
    values = np.full((1, K), value, dtype=np.float32)
    tensors = {"rows": whole[:1], "columns": whole, "values": values}
    return Update(1, tensors, sender=f"{device:032x}")


def test_a_minority_of_a_rows_devices_cannot_drag_its_median() -> None:
    one = scatter(ScatterSettings("bpr", optimizer=PLAIN, robust="median"))
    one.open_round(1)
    for device, value in enumerate((1.0, 1.0, 1.0, -1e6, -1e6)):
        one.absorb(one_row(value, device))
    one.close_round()
    np.testing.assert_allclose(one.items[0], -1.0)
    assert not one.items[1:].any()


def test_a_row_that_one_device_touches_moves_no_further_than_rows_do() -> None:
    one = scatter(ScatterSettings("bpr", optimizer=PLAIN, row_multiple=2.0))
    one.open_round(1)
    for device in range(3):
        one.absorb(one_row(1.0, device))
    hostile = one_row(-1e6, 3)
    one.absorb(Update(1, {**hostile.tensors, "rows": np.asarray([5])}, sender=hostile.sender))
    summary = one.close_round()
    assert summary.metrics["bounded_rows"] == 1
    np.testing.assert_allclose(one.items[5], 2.0 / 4)
    np.testing.assert_allclose(one.items[0], -3.0 / 4)


def test_the_adaptive_norm_holds_for_both_methods() -> None:
    for one, make in (
        (scatter(ScatterSettings("bpr", optimizer=PLAIN, clip_multiple=2.0)), scatter_update),
        (fedavg(FedAvgSettings(clip_multiple=2.0)), fedavg_update),
    ):
        one.open_round(1)  # type: ignore[attr-defined]
        for seed in range(9):
            one.absorb(make(1, seed))  # type: ignore[attr-defined]
        one.absorb(make(1, 3, 1e4))  # type: ignore[attr-defined]
        assert one.close_round().metrics["clipped"] >= 1  # type: ignore[attr-defined]
    clipped = fedavg(FedAvgSettings(clip_multiple=2.0))
    clipped.open_round(1)
    for device, scale in enumerate((1.0, 1.0, 1e6)):
        clipped.absorb(replace(fedavg_update(1, 1, scale), sender=f"{device:032x}"))
    clipped.close_round()
    honest = fedavg_update(1, 1).tensors["w.w"]
    np.testing.assert_allclose(clipped.model["w"], honest * 4 / 3, rtol=1e-5)


@pytest.mark.parametrize("robust", ["trimmed", "median"])
def test_averaging_heeds_no_minority_and_no_claim_of_samples(robust: Any) -> None:
    one = fedavg(FedAvgSettings(robust=robust, trim_share=0.2))
    one.open_round(1)
    for seed, scale, samples in ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 1e6, 10**9)):
        each = fedavg_update(1, seed, scale, samples)
        one.check(each)
        one.absorb(each)
    summary = one.close_round()
    np.testing.assert_allclose(one.model["w"], fedavg_update(1, 1).tensors["w.w"], rtol=1e-6)
    assert (summary.participants, summary.metrics["weight"]) == (5, 5.0)


OPTIONS = {"clip_multiple": 2.0, "trim_share": 0.2, "outlier_multiple": 4.0}


def methods(robust: Any) -> list[tuple[Any, Any, Any]]:
    of_scatter = ScatterSettings(
        "bpr",
        robust=robust,
        row_multiple=1.5,
        item_multiple=1.1,
        **OPTIONS,  # type: ignore[arg-type]
    )
    of_fedavg = FedAvgSettings(robust=robust, **OPTIONS)  # type: ignore[arg-type]
    return [
        (lambda: scatter(of_scatter), scatter_update, partial(ScatterSettings, "bpr")),
        (lambda: fedavg(of_fedavg), fedavg_update, FedAvgSettings),
    ]


@pytest.mark.parametrize("robust", ["trimmed", "median"])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_held_round_is_judged_by_itself_whatever_came_before(robust: str, kind: int) -> None:
    make, update, _ = methods(robust)[kind]
    one = make()
    for number, scale in ((1, 1.0), (2, 50.0)):
        one.open_round(number)
        for device in range(5):
            one.absorb(replace(update(number, 0, scale), sender=f"{device:032x}"))
        metrics = one.close_round().metrics
        assert (metrics["clipped"], metrics["outliers"]) == (0, 0), "all grew alike"


@pytest.mark.parametrize("kind", [0, 1])
def test_options_may_change_between_rounds_only(kind: int) -> None:
    (_, update, chosen), build = methods("none")[kind], (scatter, fedavg)[kind]
    plain, median = build(chosen()), build(chosen(robust="median", clip_multiple=3.0))  # type: ignore[operator]
    plain.open_round(1)
    for seed in range(3):
        plain.absorb(update(1, seed))
    # What is held can be judged by any rule; what was summed cannot.
    median.restore(plain.state())
    plain.close_round()
    plain.open_round(2)
    plain.absorb(update(2, 2))
    with pytest.raises(RestoreError, match="another 'robust'"):
        median.restore(plain.state())
    plain.close_round()
    median.restore(plain.state())
    median.open_round(3)
    median.absorb(update(3, 2))
    plain.restore(median.state())
    median.close_round()
    assert plain.close_round().version == median.version == 3


def test_blocks_of_rows_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [scatter_update(1, seed).tensors for seed in range(15)]
    held = [(each["rows"], each["columns"], each["values"]) for each in sent]
    whole = touched_means(held, (ITEMS, K), RobustRule("median"))
    monkeypatch.setattr(robust_held, "_BLOCK_VALUES", 20)
    assert touched_means(held, (ITEMS, K), RobustRule("median")).tobytes() == whole.tobytes()


def test_a_round_that_fills_its_memory_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.methods.robust.MOST_HELD_BYTES", 40)
    one = scatter(ScatterSettings("bpr", robust="median"))
    one.open_round(1)
    one.check(one_row(1.0))
    for _ in range(3):
        one.absorb(one_row(1.0))
    with pytest.raises(Refused, match="round-full"):
        one.check(one_row(1.0))


def test_settings_are_checked() -> None:
    for kind in (ScatterSettings, FedAvgSettings):
        for name, value in (
            ("robust", "krum"),
            ("trim_share", 0.5),
            ("trim_share", float("nan")),
            ("clip_multiple", 0.5),
            ("clip_multiple", float("inf")),
            ("outlier_multiple", 0.5),
        ):
            with pytest.raises(ValueError, match=name):
                kind(**{name: value})  # type: ignore[arg-type]
    for name in ("row_multiple", "item_multiple"):
        for value in (-1.0, 0.5, True):
            with pytest.raises(ValueError, match=name):
                ScatterSettings(**{name: value})  # type: ignore[arg-type]


def test_a_task_file_names_the_options(tmp_path: Path) -> None:
    (tmp_path / "items.tsv").write_text("a\nb\n")
    task = tmp_path / "task.toml"
    scatter_table = '[task]\ncatalogue = "items.tsv"\n[scatter]\n'
    task.write_text(
        scatter_table
        + 'robust = "trimmed"\ntrim_share = 0.3\nclip_multiple = 5\nrow_multiple = 3\n'
        + "outlier_multiple = 4\nitem_multiple = 2\n"
    )
    binding = read_task(task).binding
    assert isinstance(binding, ScatterBinding)
    found = binding.settings
    assert (found.robust, found.trim_share) == ("trimmed", 0.3)
    assert (found.clip_multiple, found.row_multiple) == (5, 3)
    assert (found.outlier_multiple, found.item_multiple) == (4, 2)
    for line in ('robust = "krum"', "trim_share = 0.5", "row_multiple = 0.5"):
        task.write_text(scatter_table + line + "\n")
        with pytest.raises(TaskError, match=line.split()[0]):
            read_task(task)
