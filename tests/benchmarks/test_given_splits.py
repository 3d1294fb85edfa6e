from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recommendation.split import load_split

ROOT = Path(os.environ.get("TESSERA_DATA", "../shared/data"))


@pytest.mark.parametrize(
    ("name", "users", "items", "interactions", "dropped"),
    [("ml-100k", 943, 1682, 99_057, 0), ("ml-1m", 6040, 3706, 994_169, 156)],
)
def test_published_splits(
    name: str, users: int, items: int, interactions: int, dropped: int
) -> None:
    if not (ROOT / name).is_dir():
        pytest.skip(f"no {ROOT / name}: set TESSERA_DATA to the folder of data sets")
    split = load_split(ROOT, name)
    assert (split.users, split.items) == (users, items)
    assert sum(map(len, split.train)) == interactions
    assert sum(map(len, split.negatives)) == 99 * users - dropped
    assert all(len(np.unique(rows)) == len(rows) for rows in split.train)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="netflix"):
        load_split(ROOT, "netflix")
