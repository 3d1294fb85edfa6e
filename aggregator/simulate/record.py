"""The record of a simulation: one JSON file with all that was asked for, and every round's figures.

Format ``tessera-simulation``, version 1. Nothing in it but ``took``, ``made_with`` and
``began_unix_seconds`` depends on the machine: a seed repeats the rest, and ``model_sha256`` says so
of the model.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
import platform
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError, TaskError
from aggregator.evaluation import Figure, as_json, compared
from aggregator.operate.runs import (
    FINISHED,
    FORMAT,
    FORMAT_VERSION,
    INTERRUPTED,
    STOPPED_EARLY,
    SimulationRecord,
    differing,
    finite,
)
from aggregator.simulate.fleet import ALIKE, CapabilityClass, Failures
from aggregator.simulate.task_rounds import PlayedRound
from aggregator.task.check import flat
from aggregator.task.evaluation import metric_of
from aggregator.task.file import FLEET_TABLES, Task, TaskTable, task_of
from aggregator.task.template import tables_of
from device_sdk.artifact import read_manifest
from device_sdk.fields import hints_of, is_settings
from device_sdk.methods.registry import MethodError
from device_sdk.system.clock import Clock
from device_sdk.system.files import write_atomically
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
        providers: what runs artifacts, as :class:`device_sdk.trainer.Trainer` takes it.
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
    providers: str = "auto"


class Recorder:
    """A record in the making, which is written while it grows: what has been played outlasts the
    process.

    Args:
        name: of the run; it gets a number where there is a record of that name.
        folder: for the record; it is made.
        clock: says when to write again.
        now: seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        asked: Asked,
        folder: Path,
        clock: Clock,
        now: Callable[[], float],
    ) -> None:
        ranking = task.ranking
        self._metric = metric_of(ranking)
        self.folder, self._clock, self._now = folder, clock, now
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
            "made_with": _made_with(),
        }
        self._runs: dict[int, dict[str, Any]] = {}
        """By seed."""

    @property
    def name(self) -> str:
        """Of the run; with the number that it got where it is written."""
        return str(self._record["name"])

    @property
    def left(self) -> list[int]:
        """Seeds that were asked for and are not over, in their order."""
        ended = {seed for seed, run in self._runs.items() if run["state"] != INTERRUPTED}
        return [seed for seed in self._record["asked"]["seeds"] if seed not in ended]

    def resume(self) -> None:
        """Go on with the record of that name, where there is one: what is over in it is over.

        Raises AggregatorError where it was made with other settings, options or versions.
        """
        path = self._place(self.name)
        if not path.exists():
            return
        before = SimulationRecord.read(path)
        ours = SimulationRecord(json.loads(json.dumps(finite(self._record), default=str)))
        for name, (theirs, own) in differing([before, ours]).items():
            if name != "seeds":
                raise AggregatorError(
                    f"{path} cannot be gone on with: {name} was {_spelt(theirs)} and is "
                    f"{_spelt(own)}; leave --resume out, or name the run otherwise"
                )
        self._path = path
        self._record["began_unix_seconds"] = before.summary(path, self._now()).unix_seconds
        over = [run for run in before.runs if run.get("state") in (FINISHED, STOPPED_EARLY)]
        self._runs = {int(run["seed"]): dict(run) for run in over}
        asked = self._record["asked"]
        asked["seeds"] = sorted({*asked["seeds"], *self._runs})

    def begin(self, seed: int, popularity: Iterable[Figure] = ()) -> None:
        """A run begins. ``popularity``: what the most popular items alone would reach."""
        self._record.setdefault("began_unix_seconds", self._now())
        figures = [as_json(each) for each in popularity]
        run = {"seed": seed, "state": INTERRUPTED, "rounds": [], "took": []}
        self._runs[seed] = {**run, "popularity": {"figures": figures}}

    def add(self, seed: int, played: PlayedRound) -> None:
        """A round of the run was played."""
        run, values = self._runs[seed], asdict(played)
        run["took"].append({"processor_seconds": values.pop("processor_seconds")})
        del values["earlier"]
        run["rounds"].append(values | self._told(played.figures))
        for number, figures in played.earlier.items():
            run["rounds"][number - 1] |= self._told(figures)
        began = self._clock.now()
        if self._path is None or began >= self._write_at:
            self.write()
            took = self._clock.now() - began
            self._write_at = began + max(_WRITE_EVERY_SECONDS, _WRITE_SHARE * took)

    def _told(self, figures: Sequence[Figure]) -> dict[str, Any]:
        served = compared(figures, self._metric)
        return {
            "figures": [as_json(each) for each in figures],
            "compared": None if served is None else served.stage,
        }

    def end(
        self, seed: int, state: str, figures: Iterable[Figure], version: int, model_sha256: str
    ) -> None:
        """The run ended. ``figures``: of its newest version."""
        self._runs[seed].update(
            state=state,
            model_sha256=model_sha256,
            newest={"version": version, "figures": [as_json(each) for each in figures]},
        )
        self.write()

    def made(self) -> SimulationRecord:
        """What there is so far."""
        return SimulationRecord(self._values)

    @property
    def _values(self) -> dict[str, Any]:
        runs = [self._runs[seed] for seed in sorted(self._runs)]
        return {**self._record, "state": INTERRUPTED if self.left else FINISHED, "runs": runs}

    def write(self) -> Path | None:
        """Where the record now is, whole; None where nothing was played. No other is replaced."""
        if not any(run["rounds"] for run in self._runs.values()):
            return None
        if self._path is None:
            self._path = self._claimed(self.name)
            self._record["name"] = self._path.stem
        text = json.dumps(finite(self._values), indent=1, sort_keys=True, allow_nan=False)
        write_atomically(self._path, f"{text}\n".encode())
        return self._path

    def _place(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _claimed(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = self._place(name if number == 1 else f"{name}-{number}")
            try:
                path.open("x").close()
            except FileExistsError:
                continue
            return path
        raise AssertionError


def _made_with() -> dict[str, str]:
    found = {"tessera": __version__, "python": platform.python_version(), "platform": sys.platform}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
