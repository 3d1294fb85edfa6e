"""The demo on handwritten digits: its ladder, its devices' classes, and a whole small run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from aggregator.demo.digits import EACH, deal_digits
from aggregator.demo.plan import CLASSES, LADDER, ClassPace, rungs
from aggregator.demo.program import BASELINES
from aggregator.demo.run import OneByOne
from examples import demo
from export.models.digits import RANKS, export_digits


def test_the_ladder_that_is_installed_is_what_the_exporter_makes(tmp_path: Path) -> None:
    export_digits(tmp_path / "digits", verify=False)
    shipped, made = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
        for folder in (LADDER, tmp_path / "digits")
    )
    assert shipped == made
    assert len(rungs()) == len(RANKS) == len(CLASSES)
    assert sum(map(len, shipped.values())) < 2_000_000


def test_digits_are_dealt_unequally_and_none_twice() -> None:
    dealt = deal_digits(48, np.random.default_rng(0))
    assert [len(each["y"]) for each in dealt.train] == [EACH] * 48
    kinds = [np.bincount(each["y"], minlength=10) for each in dealt.train]
    # Two kinds are more than half of what the median device has.
    assert np.median([np.sort(each)[-2:].sum() for each in kinds]) > EACH / 2
    pictures = np.concatenate([each["x"].reshape(-1, 64) for each in dealt.train])
    pictures = np.concatenate([pictures, dealt.test["x"].reshape(-1, 64)])
    assert len(np.unique(pictures, axis=0)) == len(pictures) == 48 * EACH + 357
    again = deal_digits(48, np.random.default_rng(0))
    assert np.array_equal(again.train[7]["x"], dealt.train[7]["x"])
    with pytest.raises(ValueError, match="enough for 48"):
        deal_digits(49, np.random.default_rng(0))


@pytest.mark.parametrize("times", [(7, 9, 11, 15), (10, 10, 9, 12)], ids=["rising", "noisy"])
def test_each_class_affords_one_rung_more(times: tuple[float, ...]) -> None:
    pace = ClassPace.of(dict(zip(rungs(), times, strict=True)))
    slower = [pace.slowdowns[each] for each in CLASSES]
    assert slower == sorted(slower, reverse=True)
    assert slower[-1] == 1
    for place, factor in enumerate(slower):
        # Noise apart: its own rung fits, and the next one does not.
        assert factor * times[place] <= pace.limit_seconds
        if times[place] < max(times[: place + 2]) == times[min(place + 1, 3)]:
            assert factor * times[place + 1] > pace.limit_seconds


def test_a_device_that_never_chooses_keeps_nobody_from_it() -> None:
    now = 0.0
    turns = OneByOne(lambda: now)
    assert turns.may("a") and turns.may("a") and not turns.may("b")
    now = 30.0
    assert turns.may("b") and turns.may("a") and not turns.may("c")


@pytest.mark.slow
def test_a_small_fleet_learns_and_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children(recursive=True)
    out = tmp_path / "out"
    command = ["--out", str(out), "--devices", "4", "--rounds", "2"]
    assert demo.main(command) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "2 rounds, 8 updates counted" in printed
    assert "SYNTHETIC" not in printed
    for name in BASELINES:
        assert name in printed
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "4 unequal devices learn one model" in report
    assert "In a device's own words" in report
    assert all(f"<td>{name}</td>" in report for name in CLASSES)
    assert "http" not in report.replace("http-equiv", "")
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    assert demo.main(command) == 1
    assert "holds an earlier run" in " ".join(capfd.readouterr().out.split())


def test_a_number_of_devices_that_no_deal_has_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for devices, said in (("50", "a multiple of 4"), ("52", "enough for 48")):
        assert demo.main(["--devices", devices]) == 1
        assert said in " ".join(capsys.readouterr().out.split())
