"""The device's budget: what is measured, and what counts as over it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.device_install import DeviceInstall
from benchmarks.install_size import Footprint, import_seconds, over_budget


@pytest.mark.parametrize(
    ("size_mb", "seconds", "problems"),
    [
        (200.0, 0.3, []),
        (200.5, 0.1, ["200 MB"]),
        (150.0, 0.31, ["0.3 s"]),
        (900.0, 2.0, ["200 MB", "0.3 s"]),
    ],
)
def test_each_exceeded_budget_is_named(size_mb: float, seconds: float, problems: list[str]) -> None:
    found = over_budget(Footprint("device install", size_mb, seconds, 7))
    assert [each.rpartition("budget is ")[2] for each in found] == problems


def test_the_size_is_the_sum_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_bytes(b"x" * 10)
    (tmp_path / "lib" / "deep" / "module.py").write_bytes(b"x" * 250)
    assert DeviceInstall(tmp_path).size_bytes() == 260


def test_import_time_leaves_out_the_interpreters_own_start() -> None:
    slow = import_seconds(Path(sys.executable), "import time; time.sleep(0.3)", runs=3)
    fast = import_seconds(Path(sys.executable), "pass", runs=3)
    assert slow >= 0.3
    assert fast < slow
