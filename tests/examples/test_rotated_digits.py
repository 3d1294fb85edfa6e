"""Four networks teach each other over a broker; the picture; and what the command says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples import rotated_digits

DATA = Path(os.environ.get("TESSERA_DATA", "../shared/data"))


@pytest.mark.exhaustive
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
