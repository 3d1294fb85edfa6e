"""Sinks of ``simulate``: through entry points as an installed package has them, and for real."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aggregator.cli import main
from aggregator.operate.runs import SimulationRecord
from aggregator.simulate.run import Ended, Event, Simulated
from aggregator.simulate.sinks import SINKS
from device_sdk.methods.registry import load_method, method_names
from device_sdk.system.command_line import INTERRUPTED

ROOT = Path(__file__).resolve().parents[3]
SINK = '''
import json
from pathlib import Path
from aggregator.simulate.sinks import RunSink

class Lines(RunSink):
    """One line a call."""

    def _add(self, *said):
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\\n")

    def begin(self, run):
        self.path = run.folder / f"{run.name}-{run.seed}.lines"
        self._add("begin", run.task, run.settings["scatter.columns"])

    def round(self, number, values):
        self._add("round", number, dict(values))

    def end(self, state, number, values):
        self._add("end", state, number, dict(values))

class Fails(Lines):
    def round(self, number, values):
        if number == 2:
            raise ZeroDivisionError("out of ink")
        super().round(number, values)

class Leaves(Lines):
    def begin(self, run):
        raise SystemExit(3)

class None_: pass
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With the example, and a package of sinks installed: Tessera's own too where the installation
    is of before they were there."""
    site = tmp_path / "site"
    told = site / "inks-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: inks\nVersion: 1.0\n")
    named = {"lines": "inks:Lines", "fails": "inks:Fails", "leaves": "inks:Leaves"}
    named |= {"wrong": "inks:None_", "absent": "inks:Nobody"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own: dict[str, str] = project["entry-points"][SINKS]
    installed = method_names(SINKS)
    named |= {name: value for name, value in own.items() if name not in installed}
    lines = "\n".join(f"{name} = {value}" for name, value in named.items())
    (told / "entry_points.txt").write_text(f"[{SINKS}]\n{lines}\n")
    (site / "inks.py").write_text(SINK)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    load_method.cache_clear()
    assert main(["simulate", "--example", "films"]) == 0
    yield tmp_path
    load_method.cache_clear()
    sys.modules.pop("inks", None)


def simulate(*more: str) -> int:
    command = ["simulate", "films/task.toml", "--data", "films/data.py:devices"]
    return main([*command, "--devices", "20", "--rounds", "2", *more])


def lines_of(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path, run: int = 0) -> list[dict[str, float]]:
    """Figures of each round, and of the newest version."""
    record = SimulationRecord.read(path)
    return [record.figures_of(each) for each in (*record.rounds(run), record.runs[run]["newest"])]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sink_is_told_what_is_recorded(folder: Path, jobs: str) -> None:
    (folder / "runs").mkdir()
    (folder / "runs/films.json").touch()  # so that the run gets a number
    assert simulate("--seeds", "2", "--sink", "lines", "--jobs", jobs) == 0
    for seed in (0, 1):
        begin, one, two, end = lines_of(folder / f"runs/films-2-{seed}.lines")
        assert begin == ["begin", "films", 32]
        assert [one[:2], two[:2], end[:3]] == [["round", 1], ["round", 2], ["end", "finished", 3]]
        figures = recorded(folder / "runs/films-2.json", seed)
        for told, held in zip((one[2], two[2], end[3]), figures, strict=True):
            assert {name: told[name] for name in held} == held and "hr10_all" in held
        assert one[2]["devices/selected"] > 0 and one[2]["bytes/up"] > 0 and one[2]["seconds"] > 0


@pytest.mark.parametrize(
    ("name", "why"), [("fails", "ZeroDivisionError: out of ink"), ("leaves", "SystemExit: 3")]
)
def test_a_sink_that_raises_costs_no_run_and_no_other_sink(
    folder: Path, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--seeds", "2", "--name", "quiet") == 0
    capsys.readouterr()
    assert simulate("--seeds", "2", "--sink", name, "--sink", "lines") == 0
    (said,) = capsys.readouterr().err.splitlines()  # once, for both seeds
    assert said == f"--sink {name} is left out from here on, the runs go on: {why}"
    told, quiet = (SimulationRecord.read(folder / f"runs/{n}.json") for n in ("films", "quiet"))
    shas = [[run["model_sha256"] for run in each.runs] for each in (told, quiet)]
    assert told.state == "finished" and shas[0] == shas[1]
    assert lines_of(folder / "runs/films-1.lines")[-1][:2] == ["end", "finished"]


def test_what_is_interrupted_is_ended_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Simulated.take

    def interrupted(simulated: Simulated, seed: int, event: Event) -> None:
        if isinstance(event, Ended):
            raise KeyboardInterrupt
        take(simulated, seed, event)

    monkeypatch.setattr(Simulated, "take", interrupted)
    assert simulate("--sink", "lines") == INTERRUPTED
    assert lines_of(folder / "runs/films-0.lines")[-1] == ["end", "interrupted", 3, {}]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nix", "--sink nix: no installed package offers the sink 'nix'; there are "),
        ("wrong", "inks 1.0 offers the sink 'wrong' as 'inks:None_'; expected a subclass of RunS"),
        ("absent", "inks 1.0 offers the sink 'absent' as 'inks:Nobody', which cannot be imported"),
    ],
)
def test_a_sink_that_is_none_is_refused_before_anything_runs(
    folder: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--sink", name) == 1
    assert said in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        ("tensorboard", "tensorboardX", "pip install 'tessera-edge[aggregator,tensorboard]'"),
        ("mlflow", "mlflow", "pip install mlflow, or mlflow-skinny"),
    ],
)
def test_a_sink_without_its_library_says_what_to_install(
    folder: Path,
    name: str,
    library: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, f"aggregator.simulate.{name}_sink", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    assert simulate("--sink", name) == 1
    assert said in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_tensorboard_has_the_recorded_figures(folder: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event as Written
    from tensorboardX.record_writer import RecordWriter

    assert RecordWriter  # whose format this reads: length, its checksum, data, its checksum
    assert simulate("--seeds", "2", "--sink", "tensorboard") == 0
    (path,) = (folder / "runs/tensorboard/films/seed-1").glob("events.*")
    data, scalars, texts = path.read_bytes(), dict[tuple[str, int], float](), list[str]()
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Written.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for each in event.summary.value:
            if each.HasField("tensor"):
                texts += [text.decode() for text in each.tensor.string_val]
            else:
                scalars[each.tag, event.step] = each.simple_value
    for step, held in enumerate(recorded(folder / "runs/films.json", 1), 1):
        assert {n: scalars[n, step] for n in held} == pytest.approx(held, rel=1e-6)
    assert scalars["devices/selected", 1] > 0
    assert "| scatter.columns | 32 |" in texts[0] and texts[-1] == "finished"


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed: no extra of ours"
)
def test_mlflow_has_the_recorded_figures_without_a_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert simulate("--seeds", "2", "--jobs", "2", "--sink", "mlflow") == 0
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=(folder / "runs/mlruns").as_uri())
    experiment = client.get_experiment_by_name("films")
    runs = {
        each.data.tags["tessera.seed"]: each
        for each in client.search_runs([experiment.experiment_id])
    }
    assert sorted(runs) == ["0", "1"]
    run = runs["1"]
    assert run.info.status == "FINISHED" and run.info.run_name == "films, seed 1"
    assert run.data.params["scatter.columns"] == "32"
    for name in recorded(folder / "runs/films.json", 1)[0]:
        history = client.get_metric_history(run.info.run_id, name)
        expected = [each[name] for each in recorded(folder / "runs/films.json", 1)]
        assert [each.value for each in sorted(history, key=lambda m: m.step)] == expected
