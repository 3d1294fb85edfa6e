"""Runs: what ``simulate`` played before there was a fleet, or beside it, one or two at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from aggregator.clock import moment_of
from aggregator.console.pages.files import as_csv
from aggregator.console.pages.page import ConsolePage, PageFile, PageQuery
from aggregator.errors import AggregatorError
from aggregator.evaluation import shown
from aggregator.intervals import Interval
from aggregator.look.charts import Line, Picture, line_chart
from aggregator.operate.fleet import Fleet
from aggregator.operate.runs import RunSummary, SimulationRecord, differing
from device_sdk.system.printable import printable

_MOST = 100
_STYLES = ("fleet", "tablet")
_NOTHING = Picture("")


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run, in text. ``fault``: why its record cannot be read, of which there is no more then."""

    name: str
    began: str
    state: str
    method: str
    devices: str
    rounds: str
    metric: str
    last: str
    best: str
    changed: str
    fault: str


@dataclass(frozen=True, slots=True)
class RunsView:
    """The latest runs, and those that were chosen.

    Attributes:
        folder: where their records lie.
        chosen: at most two names.
        figures: what, of the one, of the other.
        settings: likewise: in which two differ, or all of one.
        fault: why the chosen ones cannot be shown.
    """

    folder: str
    runs: tuple[RunLine, ...]
    more: int
    chosen: tuple[str, ...] = ()
    metric: str = ""
    metrics: tuple[str, ...] = ()
    picture: Picture = _NOTHING
    figures: tuple[tuple[str, ...], ...] = ()
    settings: tuple[tuple[str, ...], ...] = ()
    fault: str = ""


def _read(fleet: Fleet, query: PageQuery) -> RunsView:
    found = fleet.runs()
    view = RunsView(
        printable(str(fleet.home.folder / "runs")),
        tuple(_line(each) for each in found[:_MOST]),
        max(0, len(found) - _MOST),
    )
    try:
        records = _chosen(fleet, query)
    except AggregatorError as error:
        return replace(view, fault=printable(str(error)))
    if not records:
        return view
    metric, metrics = _metric(records.values(), query)
    return replace(
        view,
        chosen=tuple(map(printable, records)),
        metric=metric,
        metrics=metrics,
        picture=_drawn(records, metric),
        figures=tuple(_figures(records, metrics)),
        settings=tuple(_settings(records)),
    )


def _line(run: RunSummary) -> RunLine:
    changed = ", ".join(f"{name}={value}" for name, value in run.changed.items())
    return RunLine(
        printable(run.name),
        moment_of(run.unix_seconds),
        printable(run.state),
        run.method or "-",
        str(run.devices or "-"),
        "/".join(dict.fromkeys(map(str, run.rounds))) or "-",
        printable(run.metric or "-"),
        _interval(run.last),
        _interval(run.best),
        printable(changed or "-"),
        printable(run.fault),
    )


def _interval(of: Interval | None) -> str:
    if of is None:
        return "-"
    return shown(of.mean) + ("" if math.isnan(of.half_width) else f" ± {shown(of.half_width)}")


# The chosen ones.


def _chosen(fleet: Fleet, query: PageQuery) -> dict[str, SimulationRecord]:
    names = dict.fromkeys(filter(None, (query.get("run"), query.get("beside"))))
    return {name: fleet.run(name) for name in names}


def _metric(records: Iterable[SimulationRecord], query: PageQuery) -> tuple[str, tuple[str, ...]]:
    """The one that is drawn, and all."""
    names = tuple(dict.fromkeys(metric for each in records for metric in each.metrics))
    asked = query.get("metric") or ""
    return asked if asked in names else next(iter(names), ""), names


def _points(record: SimulationRecord, metric: str) -> list[tuple[float, float]]:
    """By how many rounds had been played the mean over the seeds that have the figure."""
    found: dict[int, list[float]] = {}
    for run in range(len(record.runs)):
        for each in record.points(run, metric):
            if math.isfinite(each.value):
                found.setdefault(each.after, []).append(each.value)
    return [(float(after), fmean(values)) for after, values in sorted(found.items())]


def _drawn(records: Mapping[str, SimulationRecord], metric: str) -> Picture:
    lines = [
        Line(printable(name), style, points)
        for (name, record), style in zip(records.items(), _STYLES, strict=False)
        if (points := _points(record, metric))
    ]
    title = f"{printable(metric)} by rounds played"
    return line_chart(title, lines, x_label="rounds", from_zero=False)


def _figures(
    records: Mapping[str, SimulationRecord], metrics: Sequence[str]
) -> Iterable[tuple[str, ...]]:
    """Of each run's newest version."""
    for metric in metrics:
        points = [_points(each, metric) for each in records.values()]
        yield printable(metric), *(shown(each[-1][1]) if each else "-" for each in points)


def _settings(records: Mapping[str, SimulationRecord]) -> Iterable[tuple[str, ...]]:
    every = list(records.values())
    said = (
        differing(every)
        if len(every) > 1
        else {name: [value] for name, value in every[0].settings.items()}
    )
    for name, values in said.items():
        yield printable(name), *("-" if each is None else printable(str(each)) for each in values)


# To take away.


def _picture(fleet: Fleet, query: PageQuery) -> str:
    records = _chosen(fleet, query)
    metric, _ = _metric(records.values(), query)
    drawn = _drawn(records, metric)
    if not drawn:
        raise AggregatorError("no run with figures was chosen")
    return drawn.file()


def _figures_file(fleet: Fleet, query: PageQuery) -> str:
    rows = (
        [name, run["seed"], metric, each.after, each.version, each.value]
        for name, record in _chosen(fleet, query).items()
        for metric in record.metrics
        for place, run in enumerate(record.runs)
        for each in record.points(place, metric)
    )
    return as_csv(("run", "seed", "figure", "rounds_played", "version", "value"), rows)


RUNS = ConsolePage(
    "runs",
    "Runs",
    _read,
    frozenset({"run", "beside", "metric"}),
    files=(
        PageFile("picture.svg", "image/svg+xml", _picture),
        PageFile("figures.csv", "text/csv", _figures_file),
    ),
)
