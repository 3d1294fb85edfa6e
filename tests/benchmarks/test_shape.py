"""The counts of a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shape import PRODUCT, main, shape_of


def test_files_lines_and_names_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in PRODUCT:
        (tmp_path / package).mkdir()
    (tmp_path / "export" / "deep").mkdir()
    (tmp_path / "export" / "deep" / "one.py").write_text("class Twice:\n    class Once: ...\n")
    many = "class Twice: ...\nclass Once:\n    def f(self, a, b, c, d, e, *, f): ...\n"
    (tmp_path / "aggregator" / "two.py").write_text(
        many + "def g(a, b, c, d, e): ...\n" + "\n" * 57
    )
    found = shape_of(tmp_path, PRODUCT)
    assert (found.files, found.lines, found.small, found.many) == (2, 63, 1, 1)
    assert found.twice == {"Twice": ["aggregator/two.py", "export/deep/one.py"]}
    assert shape_of(tmp_path, ["export"]).twice == {}
    assert main(["--names", str(tmp_path)]) == 0
    assert "Twice: aggregator/two.py, export/deep/one.py" in capsys.readouterr().out
