from __future__ import annotations

import numpy as np
import pytest

from device_sdk.local_data import LocalData


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
