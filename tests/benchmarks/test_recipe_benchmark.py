"""Small tables: how they are dealt, and when a model has left their commonest class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import Artifacts
from benchmarks.recipe.__main__ import WAYS, Experiment, Outcome, execute
from benchmarks.recipe.tables import eights, joined, pairs, wine


def test_a_model_has_left_from_the_round_on_since_which_it_is_better() -> None:
    right = {"now": (0.5, 0.8, 0.61, 0.7, 0.9), "never": (0.9, 0.6), "first": (0.7, 0.8)}
    found = Outcome(0.6, 0.02, 0.01, right)
    assert [found.leaves(way) for way in right] == [4, 3, 1]


def test_tables_are_dealt_without_a_row_twice() -> None:
    found = eights(Path(), np.random.default_rng(0))
    assert [len(each.label) for each in found.devices] == [40] * 36
    assert len(found.test.label) == 1797 - 36 * 40
    assert joined(found.devices).x.mean() == pytest.approx(0, abs=1e-3)
    raw = wine(Path(), np.random.default_rng(0))
    assert not raw.scaled and raw.classes == 3 and raw.test.x.max() > 1000
    few = pairs(Path(), np.random.default_rng(0))
    assert max(len(set(each.label.tolist())) for each in few.devices) <= 4
    assert sum(len(each.label) for each in few.devices) == 36 * 40


def test_a_run_has_every_way_by_round(tmp_path: Path) -> None:
    run = Experiment("wines, raw", 0, rounds=2)
    found = execute(run, tmp_path, Artifacts(tmp_path / "artifacts"), lambda _: None)
    assert set(found.right) == set(WAYS)
    assert {len(curve) for curve in found.right.values()} == {2}
    assert found.right["now"][-1] > found.majority + found.error
