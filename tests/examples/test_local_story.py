"""The story of one machine, on synthetic data and without a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from device_sdk.interactions import Interactions
from examples import local_story
from examples.datasets.movielens import DatasetError, Split
from examples.ranking import hit_rate, popularity_hit_rate


@pytest.mark.slow
def test_the_local_story_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(folder: Path, console: Console) -> None:
        raise DatasetError("no network in this test")

    monkeypatch.setattr(local_story, "download_with_bar", offline)
    command = ["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert local_story.main([*command, "--epochs", "3", "--deadline", "100", "--users", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "SYNTHETIC DATA" in printed
    assert "no network in this test" in printed
    assert "Training with k = 64" in printed
    assert "8 times slower, emulated" in printed
    assert "recommended" in printed
    assert "Synthetic item" in printed
    assert (tmp_path / "out" / "trained.checkpoint").is_file()
    assert (tmp_path / "out" / "artifact" / "manifest.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_hit_rates_on_paper() -> None:
    # Two users, four items. User 0 saw item 0, user 1 items 0 and 1; both are tested on item 2.
    names = ("a", "b", "c", "d")
    train = Interactions(np.array([0, 1, 1]), np.array([0, 0, 1]), ("u", "v"), names)
    split = Split(train, np.array([2, 2]))
    users = np.eye(2, dtype=np.float32)
    items = np.array([[9, 9], [3, 9], [2, 5], [1, 1]], np.float32)
    # User 0: unseen in order 1, 2, 3. User 1: 2, 3. Seen items do not count.
    assert hit_rate(split, users, items, 1) == 0.5
    assert hit_rate(split, users, items, 2) == 1.0
    # By popularity items 2 and 3 tie for both users: a tie is no hit.
    assert popularity_hit_rate(split, 1) == 0.0
    assert popularity_hit_rate(split, 3) == 1.0
