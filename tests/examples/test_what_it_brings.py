"""What the example prints of two small fleets."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import what_it_brings


def test_both_fleets_say_what_federation_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(what_it_brings, "DEVICES", 8)
    monkeypatch.setattr(what_it_brings, "ROUNDS", 2)
    assert what_it_brings.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("all-digits", "two-digits"):
        assert f"{name}: 8 devices, 2 rounds" in said
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert said.count("federation brings") + said.count("federation costs") >= 2
