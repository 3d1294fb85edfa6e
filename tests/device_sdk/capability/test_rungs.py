"""`bench` of artifacts and ladders: what it times, tells, keeps and lays over each other."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_sdk.artifact import load_artifact
from device_sdk.artifact.errors import ArtifactError
from device_sdk.capability.energy import EnergyMeter
from device_sdk.capability.report import BenchResult, NoResult, compared, device_names, to_csv
from device_sdk.capability.rungs import (
    OpenArtifact,
    RungRequest,
    bench_artifacts,
    found_artifacts,
)
from device_sdk.cli import main
from device_sdk.factorisation import packaged_artifact
from device_sdk.trainer import Trainer
from tests.fakes.capability_fakes import FakeClock
from tests.fakes.handmade import frozen_artifact, linear_artifact, linear_parts, write_artifact
from tests.fakes.step_clock import StepClock

QUICK = RungRequest(time_box_seconds=0.02)


def bench(folders: Sequence[Path], request: RungRequest = QUICK, **chosen: Any) -> BenchResult:
    """Without a process of its own for each one's memory."""
    given = {"providers": "cpu", "memory_of": lambda *artifact: 1000, **chosen}
    return bench_artifacts(folders, request, **given)


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    linear_artifact(tmp_path / "linear")
    return tmp_path / "linear"


def test_any_artifact_is_timed_by_its_own_step_and_what_a_round_costs_is_told(
    linear: Path, tmp_path: Path
) -> None:
    frozen_artifact(tmp_path / "frozen")
    for folder in (linear, tmp_path / "frozen", packaged_artifact()):
        (row,) = bench([folder]).rows
        assert row.option == load_artifact(folder).manifest.name
        assert row.runs >= 9 and row.p50_seconds and row.p90_seconds
        assert row.p50_seconds <= row.p90_seconds and row.samples_a_second
        assert row.once_bytes and row.numbers == load_artifact(folder).manifest.moved_numbers
    assert row.down_bytes and row.up_bytes and row.up_bytes < row.down_bytes


def test_peak_memory_is_what_training_took_and_no_more(linear: Path) -> None:
    (row,) = bench_artifacts([linear], QUICK, providers="cpu").rows
    assert row.peak_memory_bytes is None or 1e5 < row.peak_memory_bytes < 2e8


def test_the_choice_is_a_devices_and_is_confirmed(linear: Path) -> None:
    """On a clock that each look at moves on, the number of looks in a step decides."""
    manifest, files = linear_parts()
    write_artifact(linear.parent / "twin", replace(manifest, name="twin"), files)
    both = [linear, linear.parent / "twin"]

    def choose(deadline: float, **more: Any) -> BenchResult:
        request = replace(QUICK, deadline_seconds=deadline, samples=64, batch=8, **more)
        return bench(both, request, clock=StepClock(1e-3))

    found = choose(10.0)
    assert found.choice is not None and found.kind == "artifact"
    assert (found.choice.fits, found.choice.confirmed, found.choice.option) == (True, True, "twin")
    assert found.choice.round.startswith("8 steps")
    assert "the largest one" in found.choice.reason and "kept the deadline" in found.choice.reason
    for nothing in (choose(1e-6), choose(10.0, slowdown=1e7)):
        assert nothing.choice is not None and nothing.choice.option is None
        assert "Even the smallest misses" in nothing.choice.reason
    small = choose(10.0, most_memory_bytes=999).choice
    assert small is not None and not small.fits
    assert "1,000 bytes of memory, of 999" in small.reason
    few = choose(10.0, most_bytes=1).choice
    assert few is not None and not few.fits and "bytes a round, of 1." in few.reason


def test_an_emulated_device_is_so_many_times_slower(linear: Path) -> None:
    here, slow = (
        bench([linear], replace(QUICK, slowdown=each), clock=StepClock()) for each in (1.0, 8.0)
    )
    assert slow.rows[0].p50_seconds == pytest.approx(8 * (here.rows[0].p50_seconds or 0))


def test_artifacts_are_told_apart_and_odd_ones_refused(linear: Path, tmp_path: Path) -> None:
    linear_artifact(tmp_path / "more" / "linear")
    named = found_artifacts([linear, tmp_path / "more" / "linear"])
    assert [*named] == [f"{tmp_path.name}/linear", "more/linear"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "full.safetensors").touch()
    with pytest.raises(ArtifactError, match="without any rung"):
        found_artifacts([tmp_path / "empty"])
    with pytest.raises(ArtifactError, match="does not exist: is"):
        bench_artifacts([tmp_path])


def test_results_are_kept_and_laid_over_each_other(
    linear: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, slowdown in (("here", "1"), ("slow", "3")):
        command = ["bench", "--artifact", str(linear), "--time-box", "0.1", "--deadline", "60"]
        out = ["--slowdown", slowdown, "--out", str(tmp_path / name)]
        assert main([*command, *out]) == 0
        told = capsys.readouterr().out
        assert "Chosen: linear. " in told and "samples/s" in told and "affinity" in told
        assert ("EMULATED" in told) == (name == "slow")
    paths = [tmp_path / name / "bench.json" for name in ("here", "slow")]
    results = [BenchResult.read(path) for path in paths]
    assert json.loads(paths[0].read_text())["chosen"] == "linear"
    assert results[0].to_json() + "\n" == paths[0].read_text()
    assert device_names(paths) == ["here", "slow"]
    (alone,) = csv.DictReader(io.StringIO((tmp_path / "here" / "bench.csv").read_text()))
    assert alone["device"] == "here"
    assert main(["bench", "--compare", *map(str, paths), "--out", str(tmp_path / "both")]) == 0
    table = capsys.readouterr().out
    assert "here: p90 ms" in table and "slow: p90 ms" in table and "EMULATED 3 times" in table
    assert table.startswith(compared(results, ["here", "slow"]))
    lines = [*csv.DictReader(io.StringIO((tmp_path / "both" / "bench.csv").read_text()))]
    assert [each["device"] for each in lines] == ["here", "slow"]
    assert float(lines[0]["p90_seconds"]) == results[0].rows[0].p90_seconds
    assert to_csv(results, ["here", "slow"]).count("\n") == 3
    pytest.importorskip("matplotlib")
    assert (tmp_path / "both" / "bench.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "it is no JSON"),
        (b"[1]", "it has no 'tessera_bench'"),
        (b'{"k": 8, "reason": ""}', "it has no 'tessera_bench'"),
        (b'{"tessera_bench": 1, "kind": "k", "rows": 3}', "expected"),
    ],
)
def test_a_comparison_of_no_results_says_what_is_wrong(
    content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NoResult, match=why):
        BenchResult.read(path)
    assert main(["bench", "--compare", str(path)]) == 1
    assert f"{path} is no result of tessera-device bench: " in capsys.readouterr().err


@dataclass
class Supplies:
    """A machine's folders that tell of energy."""

    root: Path

    def put(self, place: str, values: Mapping[str, object]) -> None:
        folder = self.root / "sys/class" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")


def test_energy_is_told_where_the_machine_tells(tmp_path: Path) -> None:
    clock, machine = FakeClock(), Supplies(tmp_path)
    assert (EnergyMeter(clock, tmp_path).source, EnergyMeter(clock, tmp_path).joules()) == (
        "",
        None,
    )
    battery = {"type": "Battery", "status": "Discharging", "voltage_now": 4_000_000}
    machine.put("power_supply/BAT0", {**battery, "current_now": 500_000})
    meter = EnergyMeter(clock, tmp_path)
    meter.start()
    clock.sleep(3.0)
    assert meter.source == "battery" and meter.joules() == pytest.approx(6.0)
    machine.put(
        "powercap/intel-rapl:0", {"energy_uj": 9_000_000, "max_energy_range_uj": 10_000_000}
    )
    machine.put("powercap/intel-rapl:0:0", {"energy_uj": 5_000_000})  # a part of the package
    meter = EnergyMeter(clock, tmp_path)
    meter.start()
    machine.put("powercap/intel-rapl:0", {"energy_uj": 1_500_000})  # over its range
    assert meter.source == "rapl" and meter.joules() == pytest.approx(2.5)


def test_made_up_numbers_that_blow_up_are_timed_all_the_same(linear: Path) -> None:
    trainer = Trainer(linear, providers="cpu")
    batch = {"x": np.full((2, 4), 1e30, np.float32), "y": np.zeros((2, 3), np.float32)}
    trainer.step({name: np.zeros_like(array) for name, array in batch.items()})
    OpenArtifact("linear", linear, trainer, batch, 0.0, 2).step()
    assert trainer.step_count == 0
