"""The record of a simulation: one JSON file with all that was asked for, and every round's figures.

Format ``tessera-simulation``, version 1. Nothing in it but ``took`` and ``made_with`` depends on
the machine: a seed repeats the rest, and ``model_sha256`` says so of the model.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
import math
import platform
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.errors import AggregatorError, TaskError
from aggregator.evaluation import FLEET, Figure, as_json, compared, figure_name
from aggregator.simulate.fleet import ALIKE, CapabilityClass, Failures
from aggregator.simulate.task_rounds import PlayedRound
from aggregator.store.versions import Ranking
from aggregator.task.check import flat
from aggregator.task.evaluation import metric_of
from aggregator.task.file import FLEET_TABLES, Task, TaskTable, task_of
from aggregator.task.template import tables_of
from device_sdk.artifact import read_manifest
from device_sdk.evaluation.report import STAGES, Stage
from device_sdk.fields import Fields, Within, hints_of, is_settings
from device_sdk.methods.registry import MethodError
from device_sdk.system.clock import Clock
from device_sdk.system.files import write_atomically
from device_sdk.system.printable import printable
from device_sdk.system.version import __version__

Changes = Mapping[str, Any]
"""By dotted name what a setting becomes; None: it is left out of the file."""

_NO_MATTER = (*FLEET_TABLES, "models", "store")
_MOST_NAMED = 4


# A task's settings by their dotted names: changed for a run, recorded, and told apart.
#
# ``--set KEY=VALUE`` puts a value into a task file's tables before they are read, as if it stood
# there; what a run's record holds are the settings in force, with the defaults of what the file
# leaves out.


def read_change(said: str) -> tuple[str, Any]:
    """``KEY=VALUE``, the value as TOML has it, or a text without quotes; empty: left out.

    Raises AggregatorError.
    """
    key, equals, value = said.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise AggregatorError(f"{said!r} is no KEY=VALUE, such as round.share=0.2")
    if not value:
        return key, None
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value
    return key, found["value"] if len(found) == 1 else value


def changed_task(path: Path, changes: Changes) -> Task:
    """The task of a file with some settings changed; paths are relative to its folder, as in it.

    A change of ``task.method`` leaves out what the file says of its own method. Raises
    AggregatorError, which names what comes near for a setting that there is not.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    if changes:
        _put(values, changes)
    try:
        return task_of(values, path, text)
    except TaskError as error:
        changed = ", ".join(f"{key}={_spelt(value)}" for key, value in changes.items())
        raise TaskError(f"{path}: {error}" + (f" (with {changed})" if changed else "")) from None


def _put(values: dict[str, Any], changes: Changes) -> None:
    task = values.get("task", {})
    before = task.get("method", TaskTable().method) if isinstance(task, dict) else ""
    method = changes.get("task.method", before) or TaskTable().method
    if method != before:
        values.pop(before, None)
    known = _known(str(method))
    for key, value in changes.items():
        if key not in known:
            raise AggregatorError(_unknown(key, known))
        *tables, last = key.split(".")
        inside: Any = values
        for name in tables:
            inside = inside.setdefault(name, {}) if isinstance(inside, dict) else inside
        if not isinstance(inside, dict):
            raise AggregatorError(f"{'.'.join(tables)} is no table in the task file")
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = value


def _known(method: str) -> list[str]:
    """The dotted names of all settings that matter to a simulation of the method."""
    try:
        tables = tables_of(method)
    except MethodError as error:
        raise AggregatorError(f"task.method: {error}") from None
    kinds = {name: kind for name, kind in tables.items() if name not in _NO_MATTER}
    return [key for name, kind in kinds.items() for key in _names(name, kind)]


def _names(before: str, kind: type[Any]) -> Iterator[str]:
    for each in fields(kind):
        name, hint = f"{before}.{each.name}", hints_of(kind)[each.name]
        if is_settings(hint):
            yield from _names(name, hint)
        else:
            yield name


def _unknown(key: str, known: Sequence[str]) -> str:
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"{key} is a table of settings: name one of them, such as {inside[0]}"
    last = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += difflib.get_close_matches(key, known, _MOST_NAMED, 0.85)
    by_last = {name.rpartition(".")[2]: name for name in known}
    near += [by_last[each] for each in difflib.get_close_matches(last, by_last, _MOST_NAMED, 0.75)]
    named = list(dict.fromkeys(near))[:_MOST_NAMED]
    if named:
        return f"there is no setting {key}; did you mean {' or '.join(named)}?"
    tables = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
    return f"there is no setting {key}; settings are named TABLE.KEY, of the tables {tables}"


# What is in force.


def settings_of(task: Task) -> dict[str, Any]:
    """By dotted name every setting that decides how a simulation goes, as JSON has it. Of an
    artifact its id, of a catalogue its content's: paths say nothing of another machine's files."""
    named: dict[str, Any] = {
        "task.method": task.binding.method_name,
        "task.broadcast_codec": task.broadcast_codec,
        "task.update_codec": task.update_codec,
        "task.artifacts": [_artifact(each) for each in task.artifacts],
        "task.companions": [_artifact(each) for each in task.companions],
        "task.catalogue": None if task.catalogue is None else _content(task.catalogue),
        "task.warm_start": None if task.warm_start is None else task.warm_start.said,
    }
    tables = {"round": asdict(task.round), task.binding.method_name: asdict(task.binding.settings)}
    if task.evaluation is not None:
        tables["evaluation"] = asdict(task.evaluation)
    found: dict[str, Any] = json.loads(json.dumps(named | dict(flat(tables)), default=str))
    return found


def _artifact(folder: Path) -> str:
    manifest = read_manifest(folder)
    return f"{manifest.name} {manifest.id[:12]}"


def _content(path: Path) -> str:
    try:
        return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return path.name  # what reads it says what is wrong


def _spelt(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


FORMAT, FORMAT_VERSION = "tessera-simulation", 1
FINISHED, INTERRUPTED, STOPPED_EARLY = "finished", "interrupted", "stopped early"
_WRITE_EVERY_SECONDS = 10.0
_WRITE_SHARE = 50
"""Between two writes at least so many times what one took."""
_LIBRARIES = ("numpy", "onnxruntime", "tessera-edge")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the operator asked for.

    Attributes:
        data: where the data is from.
        devices, rounds: how many.
        seeds: of the runs.
        speeds: as it was said; empty for devices that are alike.
        classes: what that comes to.
        failures: how often what goes wrong.
        pace_seconds: see :class:`aggregator.simulate.fleet.VirtualFleet`.
        changes: settings that are other than in the task file, by dotted name.
    """

    data: str
    devices: int
    rounds: int
    seeds: tuple[int, ...]
    speeds: str
    failures: Failures
    pace_seconds: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[CapabilityClass, ...] = ALIKE


class Recorder:
    """A record in the making, which is written while it grows: what has been played outlasts the
    process.

    Args:
        name: of the run; it gets a number where there is a record of that name.
        folder: for the record; it is made.
        clock: says when to write again.
    """

    def __init__(self, name: str, task: Task, asked: Asked, folder: Path, clock: Clock) -> None:
        ranking = task.ranking
        self._metric = metric_of(ranking)
        self._folder, self._clock = folder, clock
        self._path: Path | None = None
        self._write_at = clock.now() + _WRITE_EVERY_SECONDS
        self._record: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": name,
            "task": {
                "name": task.name,
                "method": task.binding.method_name,
                "file": task.path.name,
                "text": task.text,
                "settings": settings_of(task),
            },
            "asked": asdict(asked),
            "best_by": None if ranking is None else asdict(ranking),
            "state": INTERRUPTED,
            "runs": [],
            "made_with": _made_with(),
        }
        self._runs: list[dict[str, Any]] = self._record["runs"]

    @property
    def name(self) -> str:
        """Of the run; with the number that it got where it is written."""
        return str(self._record["name"])

    def begin(self, seed: int, popularity: Iterable[Figure] = ()) -> None:
        """A run begins. ``popularity``: what the most popular items alone would reach."""
        figures = [as_json(each) for each in popularity]
        run = {"seed": seed, "state": INTERRUPTED, "rounds": [], "took": []}
        self._runs.append({**run, "popularity": {"figures": figures}})

    def add(self, played: PlayedRound) -> None:
        """A round of the run was played."""
        values = asdict(played)
        self._runs[-1]["took"].append({"processor_seconds": values.pop("processor_seconds")})
        del values["earlier"]
        rounds = self._runs[-1]["rounds"]
        rounds.append(values | self._told(played.figures))
        for number, figures in played.earlier.items():
            rounds[number - 1] |= self._told(figures)
        began = self._clock.now()
        if began >= self._write_at:
            self.write()
            took = self._clock.now() - began
            self._write_at = began + max(_WRITE_EVERY_SECONDS, _WRITE_SHARE * took)

    def _told(self, figures: Sequence[Figure]) -> dict[str, Any]:
        served = compared(figures, self._metric)
        return {
            "figures": [as_json(each) for each in figures],
            "compared": None if served is None else served.stage,
        }

    def end(self, state: str, figures: Iterable[Figure], version: int, model_sha256: str) -> None:
        """The run ended. ``figures``: of its newest version."""
        self._runs[-1].update(
            state=state,
            model_sha256=model_sha256,
            newest={"version": version, "figures": [as_json(each) for each in figures]},
        )

    def finish(self) -> None:
        """All that was asked for was done."""
        self._record["state"] = FINISHED

    def made(self) -> SimulationRecord:
        """What there is so far."""
        return SimulationRecord(self._record)

    def write(self) -> Path | None:
        """Where the record now is, whole; None where nothing was played. No other is replaced."""
        if not any(run["rounds"] for run in self._runs):
            return None
        if self._path is None:
            self._path = self._claimed(self._record["name"])
            self._record["name"] = self._path.stem
        text = json.dumps(_finite(self._record), indent=1, sort_keys=True, allow_nan=False)
        write_atomically(self._path, f"{text}\n".encode())
        return self._path

    def _claimed(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = self._folder / f"{name if number == 1 else f'{name}-{number}'}.json"
            try:
                path.open("x").close()
            except FileExistsError:
                continue
            return path
        raise AssertionError


class OverAlone(NamedTuple):
    """How much better the control arm's devices do than alone, with the ends of the 95 % interval:
    by the model of ``stage``, with which devices predict."""

    stage: Stage
    mean: float
    low: float
    high: float


class SimulationRecord:
    """A record as it is read.

    Args:
        values: the JSON object.

    Raises AggregatorError for what is no record of a version that is known here.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def read(cls, path: Path) -> SimulationRecord:
        """The record in a file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise AggregatorError(f"{path} is no record that can be read: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise AggregatorError(f"{path} is no record of tessera-aggregator simulate")
        if values.get("format_version") != FORMAT_VERSION:
            raise AggregatorError(
                f"{path} is of format version {values.get('format_version')!r}; this version of "
                f"Tessera reads {FORMAT_VERSION}: run simulate again"
            )
        try:
            _require_sound(_Fields(values))
        except AggregatorError as error:
            raise AggregatorError(f"{path} is not as simulate writes a record: {error}") from None
        return cls(values)

    @property
    def name(self) -> str:
        """What the operator called it."""
        return printable(str(self._values["name"]))

    @property
    def state(self) -> str:
        """``finished`` or ``interrupted``."""
        return printable(str(self._values["state"]))

    @property
    def method(self) -> str:
        return printable(str(self._values["task"]["method"]))

    @property
    def devices(self) -> int:
        return int(self._values["asked"]["devices"])

    @property
    def ranking(self) -> Ranking | None:
        """By what versions are compared."""
        said = self._values["best_by"]
        if said is None:
            return None
        return Ranking(str(said["metric"]), bool(said["higher_is_better"]))

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """One a seed."""
        runs: Sequence[Mapping[str, Any]] = self._values["runs"]
        return runs

    def rounds(self, run: int) -> Sequence[Mapping[str, Any]]:
        """Of a run, by its place."""
        rounds: Sequence[Mapping[str, Any]] = self.runs[run]["rounds"]
        return rounds

    @property
    def settings(self) -> dict[str, Any]:
        """All that was asked for and may make a run another, by name."""
        asked, task = self._values["asked"], self._values["task"]
        more = {key: value for key, value in asked.items() if key not in ("changes", "failures")}
        with_what = self._values.get("made_with", {})
        return {
            **task["settings"],
            **more,
            **asked.get("failures", {}),
            **{f"made with {name}": version for name, version in with_what.items()},
        }

    @staticmethod
    def figures_of(held: Mapping[str, Any]) -> dict[str, float]:
        """The fleet's, by name, of a round or of a run's newest version."""
        return {
            figure_name(each["stage"], each["metric"]): float(each["value"])
            for each in held["figures"]
            if each["part"] in (None, FLEET) and each["value"] is not None
        }

    def popularity(self, metric: str) -> list[float]:
        """What the most popular items alone reach of a figure, by run; none where nobody asked."""
        found = (self.figures_of(run.get("popularity", {"figures": []})) for run in self.runs)
        return [each[metric] for each in found if metric in each]

    @property
    def metrics(self) -> list[str]:
        """Names of all figures: that by which versions are compared, then those of the model that
        devices receive, then those of their own."""
        names: dict[str, None] = {} if self.ranking is None else {self.ranking.metric: None}
        for run, held in enumerate(self.runs):
            for each in (*self.rounds(run), *([held["newest"]] if "newest" in held else [])):
                names.update(dict.fromkeys(self.figures_of(each)))
        best = next(iter(names), None)
        return sorted(names, key=lambda each: (each != best, "." in each))

    def over_alone(self, run: int) -> dict[int, OverAlone]:
        """Of versions that a control arm was heard of, by how many rounds had been played, what the
        fleet's sentence says; by the metric that versions are compared by."""
        if self.ranking is None:
            return {}
        base = metric_of(self.ranking)
        found = {}
        for each in self.rounds(run):
            for figure in each["figures"]:
                of_fleet = figure["metric"] == base and figure["part"] in (None, FLEET)
                served = figure["stage"] == each.get("compared")
                if of_fleet and served and figure.get("over_alone_interval"):
                    ends = figure["over_alone_interval"]
                    told = OverAlone(figure["stage"], figure["over_alone"], *ends)
                    found[int(each["number"]) - 1] = told
        return found

    def curve(self, run: int, metric: str) -> tuple[list[int], list[float]]:
        """Versions that have a figure, by how many rounds had been played, and the figures."""
        x, y = [], []
        for each in self.rounds(run):
            found = self.figures_of(each).get(metric)
            if found is not None:
                x.append(int(each["number"]) - 1)
                y.append(found)
        newest = self.figures_of(self.runs[run].get("newest", {"figures": []})).get(metric)
        if newest is not None:
            x.append(len(self.rounds(run)))
            y.append(newest)
        return x, y


class _Fields(Fields):
    __slots__ = ()
    fault = AggregatorError


_COUNTS = ("number", "selected", "counted", "late", "silent", "crashed", "down_bytes", "up_bytes")
_COUNT, _SECONDS = Within(0, 2**62), Within(0, 1e15)


def _require_sound(root: _Fields) -> None:
    """Whether there is all that is shown of a record. Raises AggregatorError, naming the key."""
    root.text("name", 100)
    root.text("state", 100)
    task = _Fields(root.mapping("task"), "task")
    task.text("method", 100)
    task.mapping("settings")
    asked = _Fields(root.mapping("asked"), "asked")
    asked.integer("devices", Within(1, 2**62))
    for held, key in ((asked, "failures"), (root, "made_with")):
        if held.take(key, None) is not None:
            held.mapping(key)
    if root.take("best_by") is not None:
        best = _Fields(root.mapping("best_by"), "best_by")
        best.text("metric", 100)
        best.boolean("higher_is_better")
    for run in _maps(root, "runs"):
        run.integer("seed", _COUNT)
        for each in _maps(run, "rounds"):
            for name in _COUNTS:
                each.integer(name, _COUNT)
            for name in ("began_seconds", "seconds"):
                each.number(name, _SECONDS)
            for name in ("failed", "refused"):
                counts = _Fields(each.mapping(name), each.name(name))
                for reason in counts.names():
                    counts.integer(reason, _COUNT)
            if each.take("compared", None) is not None:
                each.choice("compared", STAGES)
            _require_figures(each)
        for key in ("newest", "popularity"):
            if run.take(key, None) is not None:
                _require_figures(_Fields(run.mapping(key), run.name(key)))


def _require_figures(held: _Fields) -> None:
    for each in _maps(held, "figures"):
        each.choice("stage", STAGES)
        each.text("metric", 100)
        for name in ("part", "value", "over_alone"):
            if each.take(name, None) is not None:
                _ = each.text(name, 100) if name == "part" else each.number(name)
        if each.take("over_alone_interval", None) is not None:
            ends = each.array("over_alone_interval")
            if len(ends) != 2 or not all(isinstance(end, float | int) for end in ends):
                raise each.error("over_alone_interval", "must be two numbers")


def _maps(fields: _Fields, key: str) -> Iterable[_Fields]:
    for place, each in enumerate(fields.array(key)):
        if not isinstance(each, dict):
            raise fields.error(f"{key}[{place}]", "must be a map")
        yield _Fields(each, fields.name(f"{key}[{place}]"))


def _made_with() -> dict[str, str]:
    found = {"tessera": __version__, "python": platform.python_version(), "platform": sys.platform}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _finite(value: Any) -> Any:
    """With null for what is not finite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
