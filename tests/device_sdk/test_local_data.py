from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from device_sdk.local_data import LocalData, held_out


def test_rows_are_counted_and_arrays_cannot_be_written() -> None:
    data = LocalData(
        {"x": np.zeros((3, 2)), "y": np.zeros(3)}, {"x": np.ones((1, 2)), "y": np.ones(1)}
    )
    assert (data.samples, data.public_samples) == (3, 1)
    with pytest.raises(ValueError, match="read-only"):
        data.train["x"][0] = 1


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        LocalData({"x": np.zeros(3), "y": np.zeros(2)})
    with pytest.raises(ValueError, match="expected the same"):
        LocalData({"x": np.zeros(3)}, {"z": np.zeros(3)})
    with pytest.raises(ValueError, match="float32"):
        LocalData({"x": np.zeros(3)}, {"x": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ValueError, match="numpy array"):
        LocalData({"x": np.float32(3)})  # type: ignore[dict-item]


def test_held_out_rows_are_trained_on_by_nobody_and_stay_the_same_as_data_grow() -> None:
    rows = np.arange(5000)
    data = LocalData({"x": rows.astype(np.float32), "y": rows}, holdout=0.1)
    held = set(data.test["y"].tolist())
    assert held.isdisjoint(data.train["y"].tolist())
    assert data.samples + data.test_samples == 5000
    assert 0.08 < data.test_samples / 5000 < 0.12
    assert data.train["x"].tolist() == data.train["y"].tolist()
    again = replace(data, public={"x": data.train["x"][:2], "y": data.train["y"][:2]})
    assert again.test["y"].tolist() == data.test["y"].tolist(), "nothing is split twice"
    grown = LocalData({"y": np.arange(6000)}, holdout=0.1)
    assert {row for row in grown.test["y"].tolist() if row < 5000} == held
    ever: dict[str, set[int]] = {"train": set(), "test": set()}
    for length in (5000, 6000, 70, 1, 0, 5500):
        part = LocalData({"y": np.arange(length)}, holdout=0.1)
        for what, seen in ever.items():
            seen.update(getattr(part, what)["y"].tolist())
        assert part.samples or not length, "one row is to train on"
    assert ever["train"].isdisjoint(ever["test"])
    assert LocalData({"y": rows}, holdout=0.0).test_samples == 0
    # What a larger share holds out includes what a smaller one does.
    assert held <= set(LocalData({"y": rows}, holdout=0.3).test["y"].tolist())


def test_which_rows_are_held_out_never_changes() -> None:
    """A device that is updated must not evaluate with rows that it has trained on."""
    assert np.flatnonzero(held_out(60, 0.1)).tolist() == [2, 32, 33, 41, 42, 43, 53]


def test_a_test_set_of_the_apps_own() -> None:
    data = LocalData({"x": np.zeros(3)}, test={"x": np.ones(2)})
    assert (data.samples, data.test_samples) == (3, 2)
    with pytest.raises(ValueError, match="expected one of them"):
        LocalData({"x": np.zeros(3)}, test={"x": np.ones(2)}, holdout=0.1)
    with pytest.raises(ValueError, match="expected a share"):
        LocalData({"x": np.zeros(3)}, holdout=0.9)
    with pytest.raises(ValueError, match="test holds"):
        LocalData({"x": np.zeros(3)}, test={"z": np.ones(2)})
    with pytest.raises(ValueError, match="test holds arrays of different lengths"):
        LocalData({"x": np.zeros(3), "y": np.zeros(3)}, test={"x": np.ones(2), "y": np.ones(1)})
