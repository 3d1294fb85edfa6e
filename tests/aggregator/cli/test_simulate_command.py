"""``simulate`` and ``runs``, as somebody who has just installed them types them."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.cli import main
from aggregator.errors import AggregatorError
from aggregator.operate.runs import SimulationRecord
from aggregator.simulate.devices import Chosen, DeviceAnswer, DeviceSettings, VirtualDevices
from aggregator.simulate.fleet import Failures, VirtualFleet
from aggregator.simulate.record import Asked, Recorder
from aggregator.simulate.run import Ended, Event, Simulated, WatchedDevices
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.task.file import read_task
from device_sdk.errors import ProviderError
from device_sdk.runtime.providers import candidates
from device_sdk.system.command_line import INTERRUPTED
from tests.fakes.ray_head import ray_head
from tests.fakes.step_clock import StepClock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*more: str) -> int:
    command = ["simulate", "films/task.toml", "--data", "films/data.py:devices"]
    return main([*command, "--devices", "20", "--rounds", "2", *more])


@pytest.fixture
def example(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["simulate", "--example", "films"]) == 0
    return capsys.readouterr().out


def test_the_command_that_the_example_names_can_be_pasted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--example", "two words"]) == 0
    out = capsys.readouterr().out
    assert "simulate 'two words/task.toml' --data 'two words/data.py:devices'" in out


def test_the_example_runs_and_two_runs_compare(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "simulate films/task.toml --data films/data.py:devices" in example
    assert simulate("--seeds", "2") == 0
    out = capsys.readouterr().out
    assert "hr10" in out and "±" in out and "runs/films.json holds the run" in out
    assert simulate("--dropout", "0.3", "--speeds", "k:4,8", "--name", "weak") == 0
    capsys.readouterr()
    assert main(["runs", "compare", "films", "runs/weak.json", "--picture", "compared.png"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["films", "weak"]
    assert "finished" in out
    for picture in ("runs/films.png", "runs/weak.png", "compared.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_the_record_says_all_and_repeats_but_for_what_the_machine_took(
    folder: Path, example: str
) -> None:
    found: list[dict[str, Any]] = []
    for name in ("one", "two"):
        assert simulate("--name", name, "--late", "0.2") == 0
        found.append(json.loads((folder / "runs" / f"{name}.json").read_text()))
        assert found[-1].pop("began_unix_seconds") > 1.7e9
        assert [len(run.pop("took")) for run in found[-1]["runs"]] == [2]
        assert found[-1].pop("name") == name
    assert found[0] == found[1]
    record = found[0]
    assert (record["format"], record["format_version"]) == ("tessera-simulation", 1)
    assert record["asked"]["failures"] == {"dropout": 0, "crash": 0, "late": 0.2, "nan": 0}
    assert record["best_by"] == {"metric": "hr10_all", "higher_is_better": True}
    assert record["task"]["text"] == (folder / "films/task.toml").read_text()
    (run,) = record["runs"]
    assert len(run["model_sha256"]) == 64 and run["newest"]["version"] == 2
    assert {"numpy", "onnxruntime", "tessera"} <= record["made_with"].keys()


def test_several_runs_in_one_call_end_in_one_table(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--run", "base", "--run", "narrow", "scatter.columns=8", "dropout=0.25"]
    common = ["--set", "round.share=1.0", "--seeds", "2", "--csv", "out/all.csv"]
    assert simulate(*common, *runs) == 0
    out = capsys.readouterr().out
    table = out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == ["run", "base", "narrow"]
    assert "popular" in table[0] and table[1].count("±") >= 3
    assert "runs/base.json runs/narrow.json hold the runs, compared.png shows them" in out
    assert re.search(r"^scatter.columns +32 +8$", out, re.MULTILINE)
    assert re.search(r"^dropout +0.0 +0.25$", out, re.MULTILINE)
    with (folder / "out/all.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    # For each run and seed: two rounds, the newest version, the most popular items.
    assert [(each["run"], each["seed"], each["round"]) for each in lines] == [
        (run, seed, line)
        for run in ("base", "narrow")
        for seed in "01"
        for line in ("1", "2", "after", "popular")
    ]
    assert {each["selected"] for each in lines[:2]} == {"20"}  # the share of all runs
    assert 0 <= float(lines[3]["hr10_all"]) <= 1 and lines[3]["up_bytes"] == ""
    narrow = SimulationRecord.read(folder / "runs/narrow.json")
    assert narrow.settings["scatter.columns"] == 8 and narrow.settings["round.share"] == 1.0
    # What a file leaves out is compared by its default.
    assert narrow.settings["round.deadline_margin"] == 2.0
    assert main(["runs", "compare", "base", "base"]) == 0
    assert "They differ in no setting" in capsys.readouterr().out


def test_a_setting_is_changed_as_if_it_stood_in_the_file(folder: Path, example: str) -> None:
    path = folder / "films/task.toml"
    assert simulate("--set", "scatter.columns=16", "--set", "evaluation.metrics=['hr10_all']") == 0
    path.write_text(
        path.read_text()
        .replace("columns = 32", "columns = 16")
        .replace('["hr10_all", "ndcg10_all"]', '["hr10_all"]')
    )
    assert simulate("--name", "edited") == 0
    one, two = (SimulationRecord.read(folder / f"runs/{name}.json") for name in ("films", "edited"))
    assert one.runs[0]["model_sha256"] == two.runs[0]["model_sha256"]
    assert one.settings == two.settings


def test_the_most_popular_items_are_counted_and_ranked_as_a_model_is(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Trained on: film 0 by all 20 users, 1 and 2 by the odd ones. Held back: the even ones' film 1,
    # which 2 alone ties with, and the odd ones' film 399, which nobody has and all others tie with.
    (folder / "films/few.py").write_text(
        "def devices(count, rng):\n"
        "    return [[0, 1, 2, 399] if each % 2 else [0, 1] for each in range(count)]\n"
    )
    assert simulate("--data", "films/few.py:devices", "--set", "round.quorum=1") == 0
    popular = capsys.readouterr().out.split("\n\n")[0].splitlines()[-1].split()
    assert popular[0] == "popular" and float(popular[1]) == 0.5


def test_ctrl_c_keeps_what_was_played(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = TaskSimulation.round

    def interrupted(simulation: TaskSimulation) -> Any:
        if simulation._number == 1:
            raise KeyboardInterrupt
        return play(simulation)

    monkeypatch.setattr(TaskSimulation, "round", interrupted)
    assert simulate() == INTERRUPTED
    assert "interrupted" in capsys.readouterr().out
    record = SimulationRecord.read(folder / "runs/films.json")
    assert record.state == "interrupted" and len(record.rounds(0)) == 1


LONG = ["--sweep", f"task.name={'t' * 64}"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--dropout", "0.7", "--late", "0.7"], "more than 1 together"),
        (["--speeds", "quick"], "expected lognormal:0.5, k:8,16,32 or a file of classes"),
        (["--speeds", "films/data.py"], "cannot be read as TOML"),
        (["--cluster", "slurm"], "expected ray, or ray:ADDRESS"),
        (["--workers", "2"], "--workers is for --cluster"),
        (["--cluster", "ray:127.0.0.1:1"], "at 127.0.0.1:1 cannot be reached"),
        (["--data", "films/data.py:ITEMS"], "is of type int; expected a function"),
        (["--devices", "4"], "round.quorum is 5"),
        (["--speeds", "k:4,999"], "'k=999' trains 999 columns; the task's model has 32"),
        (["--data", "films/idle.py:devices"], "none of the 20 devices has an item to train on"),
        (["--set", "scatter.colums=4"], "no setting scatter.colums; did you mean scatter.columns"),
        (["--set", "columns=4"], "no setting columns; did you mean scatter.columns?"),
        (["--set", "share=1"], "did you mean round.share"),
        (["--set", "foo.bar=1"], "of the tables task, round, scatter, evaluation"),
        (["--set", "scatter.optimizer={}"], "is a table of settings: name one of them"),
        (["--set", "scatter.columns=x"], "expected an integer from 1 to 4,096 (with scatter.col"),
        (["--set", "task.method=nix"], "offers the method 'nix'"),
        (["--set", "dropout=0.1"], "dropout is an option: --dropout"),
        (["--set", "round.share"], "'round.share' is no KEY=VALUE"),
        (["--run", "a", "b", "x=1"], "'b' is no KEY=VALUE"),
        (["--run", "a", "dropout=2"], "--run a: '2' is not from 0 to 1"),
        (["--run", "a", "round.shar=1"], "--run a: there is no setting round.shar"),
        (["--run", "a", "dropot=0.1"], "--run a: no option dropot; did you mean dropout?"),
        (["--run", "a", "--run", "a"], "two runs are named 'a'"),
        (["--run", "a", "--name", "b"], "--name is for one run"),
        (["--csv", "films"], "films is a folder"),
        (["--sweep", "scatter.columns"], "'scatter.columns' is no KEY=V1,V2"),
        (["--sweep", "scatter.columns="], "is no KEY=V1,V2"),
        (["--sweep", "scatter.columns=[4,8]"], "has one value, which is a list"),
        (["--sweep", "scatter.columns=4,8,4"], "4 stands there twice"),
        (["--sweep", "scatter.colums=4,8"], "--sweep colums-4: there is no setting scatter.colums"),
        (["--sweep", "scatter.columns=4,x"], "--sweep columns-x: films/task.toml: scatter.columns"),
        (["--sweep", "dropout=0.1,2"], "--sweep: '2' is not from 0 to 1"),
        (["--sweep", f"task.cohort={'c' * 64}", "--name", "n" * 100, *LONG], "a shorter --name"),
        (["--jobs", "2", "--cluster", "ray"], "--jobs is for processes of this machine"),
        (["--providers", "nix"], "--providers nix: providers='nix' is unknown"),
    ],
)
def test_what_cannot_be_done_is_said(
    folder: Path, example: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "films/idle.py").write_text("def devices(count, rng):\n    return [[]] * count\n")
    assert simulate(*more) == 1
    assert said in capsys.readouterr().err


def test_what_cannot_begin_leaves_the_record_of_before(folder: Path, example: str) -> None:
    assert simulate() == 0
    before = (folder / "runs/films.json").read_bytes()
    assert simulate("--devices", "4") == 1
    assert simulate("--data", "films/data.py:nothing") == 1
    assert (folder / "runs/films.json").read_bytes() == before


def bits_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a record, but for what the machine took."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    for run in found:
        del run["took"]
    return found


def test_a_sweep_is_a_run_for_each_combination_and_jobs_change_no_bit(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--seeds", "2", "--sweep", "scatter.columns=4,8", "--sweep", "dropout=0,0.2"]
    capsys.readouterr()
    assert simulate(*sweep, "--name", "s") == 0
    out = capsys.readouterr().out
    names = [f"s-columns-{k}-dropout-{p}" for k in (4, 8) for p in ("0", "0.2")]
    table = out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == ["run", *names] and table[1].count("±") >= 2
    assert re.search(r"^scatter.columns +4 +4 +8 +8$", out, re.MULTILINE)
    assert re.search(r"^dropout +0.0 +0.2 +0.0 +0.2$", out, re.MULTILINE)
    assert simulate(*sweep, "--name", "s", "--out", "jobs", "--jobs", "3") == 0
    assert multiprocessing.active_children() == []
    for name in names:
        one, other = (bits_of(folder / out / f"{name}.json") for out in ("runs", "jobs"))
        assert [run["seed"] for run in one] == [0, 1] and one == other


def test_values_that_are_lists_and_many_runs(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = "evaluation.metrics=['hr10_all'],['ndcg10_all']"
    assert simulate("--sweep", lists, "--sweep", "devices=20,21,22") == 0
    out = capsys.readouterr().out
    # A line a run, where they are too many for a column each.
    assert re.search(r"^films-metrics-no2-devices-22 +\[\"ndcg10_all\"\] .* 22$", out, re.MULTILINE)
    record = SimulationRecord.read(folder / "runs/films-metrics-no2-devices-22.json")
    assert record.settings["evaluation.metrics"] == ["ndcg10_all"] and record.devices == 22


def test_what_is_over_is_not_played_again(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take, ended = Simulated.take, list[int]()

    def interrupted(simulated: Simulated, seed: int, event: Event) -> None:
        if ended:
            raise KeyboardInterrupt
        take(simulated, seed, event)
        ended.extend([seed] if isinstance(event, Ended) else [])

    more = ["--seeds", "3", "--jobs", "2", "--resume"]
    monkeypatch.setattr(Simulated, "take", interrupted)
    assert simulate(*more) == INTERRUPTED
    assert multiprocessing.active_children() == []
    path = folder / "runs/films.json"
    (over,) = ended
    record = json.loads(path.read_text())
    before = {run["seed"]: run for run in record["runs"]}[over]
    assert record["state"] == "interrupted" and before["state"] == "finished"

    monkeypatch.setattr(Simulated, "take", take)
    assert simulate(*more) == 0
    record = json.loads(path.read_text())
    assert record["state"] == "finished"
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    assert record["runs"][over] == before  # with what it took
    assert simulate("--seeds", "3", "--name", "whole") == 0
    assert bits_of(path) == bits_of(folder / "runs/whole.json")

    assert simulate("--resume", "--seeds", "4") == 0  # one more; nothing is left out
    assert [run["seed"] for run in bits_of(path)] == [0, 1, 2, 3]
    capsys.readouterr()
    assert simulate("--resume", "--dropout", "0.1") == 1
    assert (
        "films.json cannot be gone on with: dropout was 0.0 and is 0.1" in capsys.readouterr().err
    )
    path.write_text("{")
    assert simulate("--resume") == 1
    assert "films.json is no record that can be read" in capsys.readouterr().err


def test_a_process_that_dies_costs_the_run_it_was_in(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "films/mortal.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom data import devices as living\n"
        "def devices(count, rng):\n"
        "    try:\n        Path('died').touch(exist_ok=False)\n"
        "    except FileExistsError:\n        return living(count, rng)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    more = ["--data", "films/mortal.py:devices", "--seeds", "3", "--jobs", "2"]
    assert simulate(*more) == 1
    said = capsys.readouterr()
    assert re.search(r"films, seed \d: its process was ended by signal 9", said.err)
    assert "interrupted" in said.out  # the table says how far it is
    assert len(bits_of(folder / "runs/films.json")) == 2
    assert simulate(*more, "--resume") == 0
    assert [run["seed"] for run in bits_of(folder / "runs/films.json")] == [0, 1, 2]


def test_a_run_that_fails_leaves_the_others_theirs(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for jobs in ("1", "2"):
        assert simulate("--sweep", "devices=4,20", "--jobs", jobs, "--out", jobs) == 1
        said = capsys.readouterr()
        assert "films-devices-4, seed 0: " in said.err and "round.quorum is 5" in said.err
        assert [each.name for each in (folder / jobs).glob("*.json")] == ["films-devices-20.json"]


def test_what_runs_artifacts_is_recorded_or_refused_before_anything_runs(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cuda", "webgpu", "openvino"):
        try:
            candidates(name)
        except ProviderError:
            assert simulate("--providers", name, "--name", name) == 1
            assert f"--providers {name}: {name} cannot be used: " in capsys.readouterr().err
            assert not (folder / "runs").exists()
    assert simulate("--providers", "cpu") == 0
    assert SimulationRecord.read(folder / "runs/films.json").settings["providers"] == "cpu"


def test_no_record_is_replaced(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate() == 0
    before = (folder / "runs/films.json").read_bytes()
    capsys.readouterr()
    assert simulate("--seed", "1") == 0
    assert "runs/films-2.json holds the run, films-2.png shows it" in capsys.readouterr().out
    assert (folder / "runs/films.json").read_bytes() == before
    assert SimulationRecord.read(folder / "runs/films-2.json").name == "films-2"


def test_a_long_run_is_recorded_as_it_grows(folder: Path, example: str) -> None:
    task = read_task(folder / "films/task.toml")
    asked = Asked("films/data.py:devices", 20, 5, (0,), "", Failures(), 1.0)
    settings_ = DeviceSettings(task, str(folder / asked.data), VirtualFleet(20, 0))
    clock = StepClock()
    recorder = Recorder("films", task, asked, folder / "runs", clock, lambda: 1.8e9)
    recorder.begin(0)
    for played in TaskSimulation(settings_, settings_.make()).rounds(3):
        recorder.add(0, played)
        clock.sleep(6.0)
    # Whatever ends the process now, two of the rounds are kept: 10 seconds had passed.
    assert len(SimulationRecord.read(folder / "runs/films.json").rounds(0)) == 3


def test_where_a_round_is_is_told_now_and_then() -> None:
    clock, said = StepClock(), list[str]()

    class Slow(VirtualDevices):
        def round(self, published: Any, chosen: Any) -> Iterator[DeviceAnswer]:
            for each in chosen:
                clock.sleep(0.2)
                yield DeviceAnswer(each.device)

    devices = WatchedDevices(Slow(), said.append, clock)
    devices.say("round 1")
    chosen = [Chosen(device) for device in range(1200)]
    answers: Any = devices.round(None, chosen)  # type: ignore[arg-type]
    assert [each.device for each in islice(answers, 7)] == list(range(7))
    assert said == ["round 1", "round 1, device 3 of 1,200", "round 1, device 6 of 1,200"]


def test_a_task_file_is_refused_as_serve_refuses_it(
    folder: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "films/task.toml"
    path.write_text(path.read_text().replace("share", "shard"))
    assert simulate() == 1
    assert "films/task.toml: round.shard is unknown here" in capsys.readouterr().err
    assert main(["simulate", "nowhere.toml", "--data", "a:b"]) == 1
    assert "nowhere.toml cannot be read" in capsys.readouterr().err
    assert main(["simulate"]) == 1
    assert "simulate --example DIR" in capsys.readouterr().err
    assert main(["simulate", "--example", "films"]) == 1
    assert "not empty" in capsys.readouterr().err


def test_without_matplotlib_the_run_comes_all_the_same(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate() == 0
    assert "pip install 'tessera-edge[aggregator,simulate]'" in capsys.readouterr().out
    assert sorted(os.listdir(folder / "runs")) == ["films.json"]
    assert main(["runs", "show", "films", "--picture", "films.png"]) == 1
    assert "--picture needs matplotlib" in capsys.readouterr().err


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.sampled_from([b"[]", b"{}", b'{"format": 1}', b"[" * 9999]))
def test_what_is_no_record_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(AggregatorError, match=r"run\.json is no record"):
        SimulationRecord.read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_with_something_else_in_it_is_refused_or_shown(
    tmp_path: Path, data: st.DataObject
) -> None:
    from aggregator.simulate.shown import (
        differences,
        rounds_table,
        runs_table,
        settings_table,
        summaries_table,
        write_csv,
    )

    each = {
        "number": 1, "version": 1, "counted": 1, "selected": 2, "late": 0, "silent": 1,
        "crashed": 0, "failed": {}, "refused": {}, "down_bytes": 5, "up_bytes": 5, "seconds": 1.0,
        "began_seconds": 0.0,
        "figures": [
            {"stage": "global", "metric": "hr10", "part": None, "devices": 3, "value": 0.5}
        ],
    }  # fmt: skip
    values: dict[str, Any] = {
        "format": "tessera-simulation", "format_version": 1, "name": "n", "state": "finished",
        "task": {"method": "scatter", "settings": {"round.share": 0.5}},
        "asked": {"devices": 3, "failures": {}}, "runs": [{"seed": 0, "rounds": [each]}],
        "best_by": {"metric": "hr10", "higher_is_better": True},
    }  # fmt: skip
    inside = data.draw(st.sampled_from([values, values["task"], values["runs"][0], each]))
    inside[data.draw(st.sampled_from(sorted(inside)))] = data.draw(JSON)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    try:
        record = SimulationRecord.read(path)
    except AggregatorError:
        return
    rounds_table(record)
    runs_table([record])
    differences([record, record])
    write_csv(tmp_path / "run.csv", [record])
    summaries_table([record.summary(path, 0.0)])
    settings_table(record)


def test_how_good_each_rung_is_stands_below_the_rounds() -> None:
    from aggregator.simulate.shown import parts_table

    def figures(stage: str, values: dict[str | None, float]) -> list[dict[str, Any]]:
        return [
            {"stage": stage, "metric": "accuracy", "part": part, "devices": 3, "value": value}
            for part, value in {None: 0.5, **values}.items()
        ]

    def table(values: dict[str | None, float]) -> list[list[str]]:
        rounds = [{"figures": figures("personal", values)}]
        best = {"metric": "accuracy", "higher_is_better": True}
        run = {"seed": 0, "rounds": rounds, "newest": {"figures": figures("global", values)}}
        return [
            line.split()
            for line in parts_table(SimulationRecord({"best_by": best, "runs": [run]})).splitlines()
        ]

    assert table({"full": 0.75, "half": 0.25}) == [
        ["trains", "devices", "accuracy", "personal.accuracy"],
        ["full", "3", "0.75", "0.75"],
        ["half", "3", "0.25", "0.25"],
    ]
    assert table({"full": 0.75}) == table({}) == []


SIMULATE = [sys.executable, "-m", "aggregator.cli", "simulate", "films/task.toml"]
SIMULATE += ["--data", "films/data.py:devices"]


def ray_environment(folder: Path, home: Path, room: str) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": room,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.mark.slow
@pytest.mark.exhaustive
def test_rays_workers_give_the_same_bits_and_leave_nothing(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    room = tempfile.TemporaryDirectory(prefix="t-", dir="/tmp")  # a socket's path is short
    home = folder / "home"
    home.mkdir()
    environment = ray_environment(folder, home, room.name)
    for name, more in (("here", []), ("rayed", ["--cluster", "ray", "--workers", "2"])):
        command = [*SIMULATE, "--devices", "150", "--rounds", "2", "--name", name, *more]
        subprocess.run(command, check=True, env=environment)
    here, rayed = (
        json.loads((folder / "runs" / f"{name}.json").read_text())["runs"]
        for name in ("here", "rayed")
    )
    for run in (*here, *rayed):
        run.pop("took")
    assert here == rayed
    assert list(home.iterdir()) == [] and os.listdir(room.name) == []
    room.cleanup()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_that_runs_elsewhere_is_joined(folder: Path, example: str) -> None:
    pytest.importorskip("ray")
    room = tempfile.TemporaryDirectory(prefix="t-", dir="/tmp")
    environment = ray_environment(folder, Path(room.name), room.name)
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ray_head(environment, Path(room.name), 1) as address:
        joined = [*SIMULATE, "--devices", "20", "--rounds", "2", "--cluster", f"ray:{address}"]
        subprocess.run([*joined, "--name", "joined"], check=True, env=environment)
        wrong = {
            subprocess.run(
                [*joined, *more], env=environment, capture_output=True, text=True, check=False
            ).stderr
            for more in (["--data", "films/data.py:absent"], ["--workers", "2"])
        }
    assert wrong == {
        "tessera-aggregator: films/data.py has no absent; its functions are devices\n",
        "tessera-aggregator: --workers is 2; the cluster has 1 CPU cores\n",
    }
    assert simulate("--name", "here") == 0
    here, there = (SimulationRecord.read(folder / f"runs/{n}.json") for n in ("here", "joined"))
    assert here.runs[0]["model_sha256"] == there.runs[0]["model_sha256"]
    shutil.rmtree(room.name, ignore_errors=True)
