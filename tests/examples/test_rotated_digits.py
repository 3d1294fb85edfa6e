"""Four networks teach each other over a broker; the picture; and what the command says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from examples import rotated_digits
from examples.rotated_picture import draw_picture

DATA = Path(os.environ.get("TESSERA_DATA", "../shared/data"))


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason=f"no MNIST in {DATA}")
def test_devices_of_two_architectures_learn_each_others_rotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each further network is an export or two; test_image_models.py has them all.
    two = {"M0": "lenet", "M20": "lenet", "M40": "vgg", "M60": "lenet"}
    monkeypatch.setattr(rotated_digits, "NETWORKS", two)
    command = ["--rounds", "2", "--each", "12", "--out", str(tmp_path), "--data", str(DATA)]
    assert rotated_digits.main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, network in two.items():
        assert name in printed and network in printed
    assert "often than after training alone" in printed
    assert (tmp_path / "rotated_digits.png").stat().st_size > 10_000


def test_a_missing_data_set_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rotated_digits.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "TESSERA_DATA" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rotated_digits.main(["--help"])
    assert stopped.value.code == 0
    assert "no global model" in " ".join(capsys.readouterr().out.split())


def test_the_picture_holds_a_column_for_each_device(tmp_path: Path) -> None:
    images = {name: np.zeros((8, 1, 28, 28), np.float32) for name in ("a", "b")}
    curves = {name: [(1, 50.0, 20.0), (2, 60.0, 40.0)] for name in images}
    path = draw_picture(tmp_path / "made" / "p.png", images, curves, dict.fromkeys(images, (5, 9)))
    assert path.read_bytes().startswith(b"\x89PNG")
