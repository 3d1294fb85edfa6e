"""Runs of ``tessera-aggregator simulate``, as they lie in a folder: a record a run, JSON.

What reads them needs nothing of what plays them. A record that cannot be read says why, and hides
no other.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.errors import AggregatorError
from aggregator.evaluation import FLEET, figure_name
from aggregator.intervals import Interval, interval
from aggregator.store.versions import Ranking
from aggregator.task.evaluation import metric_of
from device_sdk.evaluation.report import STAGES, Stage
from device_sdk.fields import Fields, Within
from device_sdk.system.files import read_small
from device_sdk.system.printable import printable

FORMAT, FORMAT_VERSION = "tessera-simulation", 1
FINISHED, INTERRUPTED, STOPPED_EARLY = "finished", "interrupted", "stopped early"
DAMAGED = "damaged"
USUAL_FOLDER = Path("runs")
_SUFFIX = ".json"
_MOST_BYTES = 256 << 20
_USUAL_OPTIONS = {"speeds": "", "pace_seconds": 1.0, "providers": "auto"}
"""Options of a run that are told where they are others."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run of a folder, in short.

    Attributes:
        name: its record's, without ``.json``.
        path: of the record.
        unix_seconds: when it began; when its record was written, where that does not say.
        state: ``finished``; ``stopped early``, by the task's ``evaluation.early_stopping``;
            ``interrupted``, or still being played; or ``damaged``: of such a one there is no more
            than ``fault``.
        fault: why the record cannot be read.
        changed: settings other than in the task's file, and options other than the usual ones.
        seeds: that were played, and ``rounds`` of each.
        metric: by which versions are compared; empty where nothing says so.
        last, best: the newest version's figure and the best version's, over the seeds.
        best_versions: by seed.
    """

    name: str
    path: Path
    unix_seconds: float
    state: str
    fault: str = ""
    task: str = ""
    method: str = ""
    devices: int = 0
    changed: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    metric: str = ""
    last: Interval | None = None
    best: Interval | None = None
    best_versions: tuple[int, ...] = ()


def runs_in(folder: Path) -> list[RunSummary]:
    """All runs of a folder, the latest first. Raises AggregatorError where there is none such."""
    try:
        paths = [each for each in folder.iterdir() if each.suffix == _SUFFIX]
    except OSError as error:
        raise AggregatorError(
            f"{folder} cannot be listed: {error.strerror}; simulate writes runs into its --out, "
            f"{USUAL_FOLDER} if nothing is said"
        ) from None
    found = map(_summary, paths)
    return sorted(found, key=lambda each: (-each.unix_seconds, each.name))


def run_path(said: str, folder: Path) -> Path:
    """The record of a run that is named by its file or, in the folder, by its name.

    Raises AggregatorError, which names what comes near.
    """
    for path in (folder / f"{said}{_SUFFIX}", Path(said)):
        if path.suffix == _SUFFIX and path.exists():
            return path
    names = [each.stem for each in folder.glob(f"*{_SUFFIX}")]
    near = difflib.get_close_matches(said, names, 3) or sorted(names)[:3]
    known = f"; there is {', '.join(near)}" if near else ""
    raise AggregatorError(f"there is no run {said} in {folder}, and no such file{known}")


def differing(records: Sequence[SimulationRecord]) -> dict[str, list[Any]]:
    """By name the settings, options and versions in which records differ, and what each has; None
    where it has no such setting."""
    settings = [each.settings for each in records]
    names = dict.fromkeys(name for each in settings for name in each)
    found = {name: [each.get(name) for each in settings] for name in names}
    return {name: said for name, said in found.items() if any(each != said[0] for each in said)}


def _summary(path: Path) -> RunSummary:
    try:
        written = path.stat().st_mtime
        record = SimulationRecord.read(path)
    except OSError as error:  # a link that leads nowhere
        return RunSummary(path.stem, path, 0.0, DAMAGED, f"cannot be read: {error.strerror}")
    except AggregatorError as error:
        fault = str(error).removeprefix(f"{path} ")
        return RunSummary(path.stem, path, written, DAMAGED, fault)
    return record.summary(path, written)


class OverAlone(NamedTuple):
    """How much better the control arm's devices do than alone, with the ends of the 95 % interval:
    by the model of ``stage``, with which devices predict."""

    stage: Stage
    mean: float
    low: float
    high: float


class Point(NamedTuple):
    """A version's figure. ``after``: how many rounds had been played."""

    after: int
    version: int
    value: float


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
            values = json.loads(read_small(path, _MOST_BYTES).decode())
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

    def summary(self, path: Path, written: float) -> RunSummary:
        """In short. ``written``: when the file at ``path`` was, in seconds since 1970."""
        stopped = any(run.get("state") == STOPPED_EARLY for run in self.runs)
        early = self.state == FINISHED and stopped
        task, asked = self._values["task"], self._values["asked"]
        options = {key: asked[key] for key in _USUAL_OPTIONS if key in asked}
        usual = {**_USUAL_OPTIONS, **dict.fromkeys(asked.get("failures") or {}, 0.0)}
        options |= asked.get("failures") or {}
        changed = {key: value for key, value in options.items() if value != usual[key]}
        metric = self.ranking.metric if self.ranking is not None else ""
        runs = range(len(self.runs))
        curves = [self.points(run, metric) for run in runs]
        best = [each for run in runs if (each := self.best(run)) is not None]
        return RunSummary(
            name=path.stem,
            path=path,
            unix_seconds=float(self._values.get("began_unix_seconds") or written),
            state=STOPPED_EARLY if early else self.state,
            task=printable(str(task.get("name", ""))),
            method=self.method,
            devices=self.devices,
            changed={**(asked.get("changes") or {}), **changed},
            seeds=tuple(int(run["seed"]) for run in self.runs),
            rounds=tuple(len(self.rounds(run)) for run in runs),
            metric=metric,
            last=_over_seeds([points[-1].value for points in curves if points]),
            best=_over_seeds([each.value for each in best]),
            best_versions=tuple(each.version for each in best),
        )

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
        with_what = self._values.get("made_with") or {}
        return {
            **task["settings"],
            **more,
            **(asked.get("failures") or {}),
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

    def points(self, run: int, metric: str) -> list[Point]:
        """A figure of each version that has it."""
        rounds = self.rounds(run)
        held = [(int(each["number"]) - 1, each) for each in rounds]
        if "newest" in self.runs[run]:
            held.append((len(rounds), self.runs[run]["newest"]))
        return [
            Point(after, int(each["version"]), found[metric])
            for after, each in held
            if metric in (found := self.figures_of(each))
        ]

    def best(self, run: int) -> Point | None:
        """The best version of a run, the first of several, by what versions are compared by."""
        if self.ranking is None:
            return None
        sign = 1 if self.ranking.higher_is_better else -1
        points = self.points(run, self.ranking.metric)
        return max(points, key=lambda each: sign * each.value, default=None)


class _Fields(Fields):
    __slots__ = ()
    fault = AggregatorError


_COUNTS = (
    *("number", "version", "selected", "counted", "late", "silent", "crashed"),
    *("down_bytes", "up_bytes"),
)
_COUNT, _SECONDS = Within(0, 2**62), Within(0, 1e15)


def _require_sound(root: _Fields) -> None:
    """Whether there is all that is shown of a record. Raises AggregatorError, naming the key."""
    root.text("name", 255)
    root.text("state", 100)
    task = _Fields(root.mapping("task"), "task")
    task.text("method", 100)
    task.mapping("settings")
    asked = _Fields(root.mapping("asked"), "asked")
    asked.integer("devices", Within(1, 2**62))
    if root.take("began_unix_seconds", None) is not None:
        root.number("began_unix_seconds", _SECONDS)
    for held, key in ((asked, "failures"), (asked, "changes"), (root, "made_with")):
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
            if key in run.names():
                held = _Fields(run.mapping(key), run.name(key))
                _require_figures(held)
                if key == "newest":
                    held.integer("version", _COUNT)


def _require_figures(held: _Fields) -> None:
    for each in _maps(held, "figures"):
        each.choice("stage", STAGES)
        each.text("metric", 100)
        each.integer("devices", _COUNT)
        if each.take("part") is not None:
            each.text("part", 100)
        if each.take("value") is not None:
            each.number("value")
        if each.take("over_alone_interval", None) is not None:
            each.number("over_alone")
            ends = each.array("over_alone_interval")
            if len(ends) != 2 or not all(isinstance(end, float | int) for end in ends):
                raise each.error("over_alone_interval", "must be two numbers")


def _maps(fields: _Fields, key: str) -> Iterable[_Fields]:
    for place, each in enumerate(fields.array(key)):
        if not isinstance(each, dict):
            raise fields.error(f"{key}[{place}]", "must be a map")
        yield _Fields(each, fields.name(f"{key}[{place}]"))


def _over_seeds(values: Sequence[float]) -> Interval | None:
    return interval(values) if values else None


def finite(value: Any) -> Any:
    """With null for what is not finite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
