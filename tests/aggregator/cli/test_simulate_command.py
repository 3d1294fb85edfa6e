"""``simulate`` and ``runs``, as somebody who has just installed them types them."""

from __future__ import annotations

import csv
import json
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
from aggregator.simulate.run import WatchedDevices
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.task.file import read_task
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
        recorder.add(played)
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
        "figures": [{"stage": "global", "metric": "hr10", "part": None, "value": 0.5}],
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
