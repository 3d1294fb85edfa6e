"""Mains power and idleness, as a folder of the kernel's and its load average tell them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from device_sdk.conditions import Gate, on_mains_power, when_idle

linux = pytest.mark.skipif(sys.platform == "darwin", reason="macOS is asked through pmset")


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_text(content + "\n")


AC = {"type": "Mains", "online": "1"}
NO_AC = {"type": "Mains", "online": "0"}
DRAINS = {"type": "Battery", "status": "Discharging"}
CHARGES = {"type": "Battery", "status": "Charging"}
MOUSE = {"type": "Battery", "status": "Discharging", "scope": "Device"}
USB = {"type": "USB", "online": "1"}


@linux
@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], True),  # a server, a kiosk: no battery at all
        ([AC], True),
        ([AC, CHARGES], True),
        ([AC, DRAINS], True),  # a weak charger
        ([NO_AC, DRAINS], False),
        ([NO_AC], False),
        ([DRAINS], False),
        ([CHARGES], True),
        ([MOUSE], True),
        ([NO_AC, MOUSE, USB], True),
        ([{"type": "Mains", "online": "?"}, DRAINS], False),
        ([{}], True),
    ],
)
def test_mains_power_as_the_kernel_tells_it(
    supplies: list[dict[str, str]], expected: bool, tmp_path: Path
) -> None:
    for number, files in enumerate(supplies):
        supply(tmp_path, f"supply-{number}", **files)
    for unknown in (True, False):
        assert on_mains_power(folder=tmp_path, unknown=unknown)() is expected


@linux
def test_where_the_kernel_does_not_tell_the_default_answers(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert on_mains_power(folder=gone)() is True
    assert on_mains_power(folder=gone, unknown=False)() is False


@linux
def test_it_is_looked_at_anew_each_time(tmp_path: Path) -> None:
    asks = on_mains_power(folder=tmp_path)
    supply(tmp_path, "AC", **NO_AC)
    supply(tmp_path, "BAT0", **DRAINS)
    assert not asks()
    (tmp_path / "AC" / "online").write_text("1\n")
    assert asks()


def test_macos_is_asked_by_pmset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    said = tmp_path / "pmset"
    monkeypatch.setattr("device_sdk.conditions._PMSET", str(said))
    assert on_mains_power()() is True and on_mains_power(unknown=False)() is False
    for source, expected in (("AC Power", True), ("Battery Power", False), ("Sun", False)):
        said.write_text(f"#!/bin/sh\necho \"Now drawing from '{source}'\"\n")
        said.chmod(0o755)
        assert on_mains_power(unknown=False)() is expected


def test_idleness_is_the_load_of_the_time_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.9, 1.1, 3.0))
    assert when_idle(30)() and when_idle()()
    assert not when_idle(61)() and when_idle(300, most_load=0.3)()
    assert not when_idle(900, most_load=0.5)() and when_idle(900, most_load=0.8)()

    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert when_idle()() is True and when_idle(unknown=False)() is False
    monkeypatch.delattr(os, "getloadavg")
    assert when_idle()() is True and when_idle(unknown=False)() is False
    for seconds, load in ((0, 1), (901, 1), (float("nan"), 1), (60, 0), (60, float("nan"))):
        with pytest.raises(ValueError, match="expected above 0"):
            when_idle(seconds, most_load=load)


def test_a_gate_asks_at_once_for_other_work_and_by_the_clock_for_the_same() -> None:
    now, answer, asked = 100.0, False, 0

    def only_when() -> bool:
        nonlocal asked
        asked += 1
        return answer

    gate = Gate(only_when, 10.0, lambda: now)
    first, second = object(), object()
    assert not gate.opens_for(first) and gate.next_seconds == 110.0
    answer = True
    assert not gate.opens_for(first) and asked == 1
    now = 110.0
    assert gate.opens_for(first) and asked == 2
    answer = False
    assert not gate.opens_for(second) and asked == 3
    assert not gate.opens_for(first) and asked == 4


@pytest.mark.parametrize("error", [OSError("no such sensor"), SystemExit(3)])
def test_an_app_s_function_that_fails_in_any_way_counts_as_no(error: BaseException) -> None:
    def only_when() -> bool:
        raise error

    gate = Gate(only_when, 10.0, lambda: 0.0)
    assert not gate.opens_for("work")
    assert gate.problem.startswith(f"only_when failed: {type(error).__name__}")
