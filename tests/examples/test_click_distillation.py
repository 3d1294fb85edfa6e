"""Four devices over MQTT on made-up ratings, and what the program says when it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import click_distillation
from tests.benchmarks.made_up_movielens import made_up_movielens


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_devices_teach_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made_up_movielens(tmp_path)
    out = tmp_path / "out"
    command = ["--data", str(root), "--users", "52", "--rounds", "3", "--out", str(out)]
    assert click_distillation.main(command) == 0
    printed = capsys.readouterr().out
    assert "round  3/3" in printed
    table = [line.split() for line in printed.splitlines() if line.startswith(("anna", "dana"))]
    assert [line[0] for line in table] == ["anna", "dana"]
    for line in table:
        assert line[4] in ("wide_deep", "deepfm_attention", "cnn_attention")
        assert 100 < int(line[-1]) < 600  # bytes a round, sealed
    assert (out / "click_distillation.png").read_bytes().startswith(b"\x89PNG")
