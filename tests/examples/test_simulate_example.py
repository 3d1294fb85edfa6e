"""MovieLens on virtual devices: the task that the example writes, and the data that it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregator.cli import main as aggregator
from examples.simulate import main, ml_1m
from tests.benchmarks.made_up_movielens import made_up_movielens


def test_the_task_and_the_data_of_movielens_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(made_up_movielens(tmp_path)))
    folder = tmp_path / "films"
    assert main([str(folder), "--data", "ml-1m"]) == 0
    task, data = folder / "task.toml", "examples.simulate:ml_1m"
    assert f"simulate {task} --data {data}" in capsys.readouterr().out
    command = ["simulate", str(task), "--data", data, "--devices", "60", "--rounds", "1"]
    assert aggregator([*command, "--out", str(tmp_path / "runs")]) == 0
    assert "hr10" in capsys.readouterr().out
    first, *_ = ml_1m(60, np.random.default_rng(0))
    lines = (tmp_path / "ml-1m/ratings_no_timestamp.dat").read_text().splitlines()
    assert first == [line.split("::")[1] for line in lines if line.startswith("1::")]


def test_data_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    for data in ("ml-100k", "ml-1m"):
        assert main([str(tmp_path / "films"), "--data", data]) == 1
        assert "set TESSERA_DATA" in capsys.readouterr().err
