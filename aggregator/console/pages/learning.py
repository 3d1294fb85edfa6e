"""Learning: how good each version is, what rounds say of it, and two versions beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aggregator.console.pages.files import as_csv
from aggregator.console.pages.page import (
    ConsolePage,
    PageFile,
    PageQuery,
    number_asked,
    task_asked,
)
from aggregator.errors import AggregatorError
from aggregator.evaluation import (
    FLEET,
    Figure,
    compared,
    ends_of,
    figure_name,
    part_name,
    shown,
    what_it_brings,
    what_serves,
)
from aggregator.look.charts import Band, Bar, Line, Picture, bar_chart, line_chart
from aggregator.methods.said import ROUND_METRICS
from aggregator.operate.comparing import ComparedVersion
from aggregator.operate.fleet import Fleet
from aggregator.operate.training import FleetTraining
from aggregator.operate.versions import FleetEvaluations
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import RoundRow
from device_sdk.evaluation.report import STAGES, Stage
from device_sdk.system.printable import printable, size, span

_MOST_DRAWN = 200
_MOST_ROWS = 20
_MOST_IN_FILE = 5000
_MOST_LINES, _MOST_PICTURES = 8, 6
_STAGES: dict[Stage, tuple[str, str]] = {
    "global": ("the model that devices receive", "fleet"),
    "personal": ("their own, after training", "tablet"),
    "alone": ("the control arm's, trained alone", "sensor dashed"),
}
_STYLES = ("sensor", "phone", "tablet", "desktop")


@dataclass(frozen=True, slots=True)
class LearningPicture:
    """A picture, the name by which it is taken away, and what it is of; empty where unknown."""

    name: str
    picture: Picture
    means: str = ""


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """What the fleet found of a version by one metric, in text: of the model that devices receive,
    of their own, and of the control arm's; the worst tenth is of the model that they predict
    with."""

    version: int
    best: bool
    round: int
    received: str
    own: str
    alone: str
    worst_tenth: str
    devices: int


@dataclass(frozen=True, slots=True)
class FigureLine:
    """A figure, in text."""

    figure: str
    part: str
    value: str
    median: str
    worst_tenth: str
    devices: int
    samples: str


@dataclass(frozen=True, slots=True)
class RoundLine:
    """A round, in text."""

    round: int
    made: str
    selected: int
    counted: str
    took: str
    told: str


@dataclass(frozen=True, slots=True)
class CostLine:
    """What a round took devices on average, as those told that did."""

    round: int
    devices: int
    trained: str
    received: str


@dataclass(frozen=True, slots=True)
class ComparedFigures:
    """Two versions. ``facts``, ``figures`` and ``settings``: what, of the one, of the other;
    ``figures`` with the difference."""

    one: int
    other: int
    facts: tuple[tuple[str, str, str], ...]
    figures: tuple[tuple[str, str, str, str], ...]
    settings: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class LearningView:
    """A task's figures.

    Attributes:
        tasks: all that there are; ``metrics``: all that ``metric`` may be.
        best, best_by: the best version, and by what; empty where nothing says so.
        brings, serves, note: sentences; empty for none.
        rounds_drawn, rounds_more: pictures of what rounds say, and names of what is not drawn.
        history: of the last versions; ``figures``: all of the ``newest`` one.
        parts: devices by the part of the model that they trained last, in text.
        asked: what was asked to be compared, and ``fault``: why it cannot be.
    """

    task: str
    tasks: tuple[str, ...]
    metric: str
    metrics: tuple[str, ...]
    best: int | None
    best_by: str
    brings: str
    serves: str
    note: str
    quality: tuple[LearningPicture, ...]
    rounds_drawn: tuple[LearningPicture, ...]
    rounds_more: tuple[str, ...]
    history: tuple[VersionFigures, ...]
    newest: int | None
    figures: tuple[FigureLine, ...]
    rounds: tuple[RoundLine, ...]
    parts: Picture
    costs: tuple[CostLine, ...]
    asked: str = ""
    compared: ComparedFigures | None = None
    fault: str = ""


def _read(fleet: Fleet, query: PageQuery) -> LearningView:
    task, tasks = task_asked(fleet, query)
    found, rounds = fleet.evaluations(task, _MOST_DRAWN), fleet.rounds(task, _MOST_DRAWN)
    training, said = fleet.training(task), _said(rounds, query)
    metric, metrics = _metrics(found, query)
    newest = found.versions[0].figures if found.versions else ()
    asked, beside, fault = query.get("compare") or "", None, ""
    if asked:
        try:
            beside = _compare(fleet, task, asked)
        except AggregatorError as error:
            fault = printable(str(error))
    return LearningView(
        task=task,
        tasks=tasks,
        metric=metric,
        metrics=metrics,
        best=found.best,
        best_by="" if found.ranking is None else printable(found.ranking.metric),
        brings=what_it_brings(newest, metric, asked=found.control) if newest else "",
        serves=what_serves(newest, metric) if newest else "",
        note=printable(found.note),
        quality=tuple(_quality(found, metric)),
        rounds_drawn=tuple(_of_round(rounds, each) for each in said[:_MOST_PICTURES]),
        rounds_more=said[_MOST_PICTURES:],
        history=tuple(_history(found, metric)),
        newest=found.versions[0].version if found.versions else None,
        figures=tuple(map(_line, newest)),
        rounds=tuple(_round(each) for each in rounds[:_MOST_ROWS]),
        parts=_parts(training),
        costs=tuple(_costs(training)),
        asked=asked,
        compared=beside,
        fault=fault,
    )


def _metrics(found: FleetEvaluations, query: PageQuery) -> tuple[str, tuple[str, ...]]:
    """The one that is shown, and all."""
    names = dict.fromkeys(each.metric for of in found.versions[:1] for each in of.figures)
    usual = found.metric if found.metric in names else next(iter(names), "")
    asked = query.get("metric")
    return asked if asked in names else usual, tuple(names)


# Pictures.


def _quality(found: FleetEvaluations, metric: str) -> Iterable[LearningPicture]:
    versions, marks = found.versions[::-1], []
    known = {each.version for each in versions}
    if found.best is not None and found.best in known:
        marks = [(f"best: {found.best}", float(found.best))]
    lines = [
        Line(name, style, points)
        for stage, (name, style) in _STAGES.items()
        if (points := _points(versions, stage, metric, FLEET))
    ]
    stage = _served(found.versions, metric)
    if tenth := _points(versions, stage, metric, FLEET, of="worst_tenth"):
        lines.append(Line("worst tenth of the devices", "dense dashed", tenth))
    yield LearningPicture("quality", _drawn(f"{metric} by version", lines, marks))
    parts = dict.fromkeys(
        each.part
        for of in versions
        for each in of.figures
        if each.part != FLEET and (each.metric, each.stage) == (metric, stage)
    )
    by_part = [
        Line(printable(part_name(part)), style, _points(versions, stage, metric, part))
        for part, style in zip(sorted(parts), _styles(), strict=False)
    ]
    if by_part:
        whole = Line("whole fleet", "fleet", _points(versions, stage, metric, FLEET))
        title = f"{metric} by version and by what devices train"
        yield LearningPicture("parts", _drawn(title, [whole, *by_part], marks))
    brings = [
        (of.version, figure.over_alone, ends[0], ends[1])
        for of in versions
        if (figure := compared(of.figures, metric)) is not None
        and (ends := ends_of(figure.over_alone, figure.over_alone_half_width))
    ]
    if brings:
        yield LearningPicture(
            "brings",
            line_chart(
                f"{metric} ahead of the same devices alone, with its 95 % interval",
                [Line("ahead of alone", "tablet", [(x, mean) for x, mean, _, _ in brings])],
                x_label="version",
                bands=[Band("tablet", [(x, low, high) for x, _, low, high in brings])],
                levels=[("nothing", 0.0)],
            ),
        )


def _drawn(title: str, lines: list[Line], marks: Sequence[tuple[str, float]]) -> Picture:
    return line_chart(title, lines, x_label="version", marks=marks, from_zero=False)


def _served(versions: Sequence[EvaluatedVersion], metric: str) -> Stage:
    """The stage of the model that devices predict with."""
    figure = compared(versions[0].figures, metric) if versions else None
    return "global" if figure is None else figure.stage


def _points(
    versions: Iterable[EvaluatedVersion], stage: str, metric: str, part: str, of: str = "value"
) -> list[tuple[float, float]]:
    return [
        (version.version, float(value))
        for version in versions
        for each in version.figures
        if (each.stage, each.metric, each.part) == (stage, metric, part)
        and (value := getattr(each, of)) is not None
        and math.isfinite(value)
    ]


def _styles() -> list[str]:
    return [f"{each}{dashed}" for dashed in ("", " dashed") for each in _STYLES][:_MOST_LINES]


def _said(rounds: Sequence[RoundRow], query: PageQuery) -> tuple[str, ...]:
    """What a method says of its rounds: what was asked for first, then the loss."""
    names = {
        name
        for each in rounds
        for name, value in (each.metrics or {}).items()
        if math.isfinite(value)
    }
    asked = query.get("said")
    return tuple(sorted(names, key=lambda each: (each != asked, "loss" not in each, each)))


def _of_round(rounds: Sequence[RoundRow], name: str) -> LearningPicture:
    points = [
        (float(each.round), float(each.metrics[name]))
        for each in reversed(rounds)
        if each.metrics and math.isfinite(each.metrics.get(name, math.nan))
    ]
    called = printable(name)
    line = Line(called, "fleet" if "loss" in name else "desktop", points)
    drawn = line_chart(f"{called} by round", [line], x_label="round", from_zero=False)
    known = ROUND_METRICS.get(name)
    return LearningPicture(name, drawn, known.means if known else "")


def _parts(training: FleetTraining) -> Picture:
    bars = [
        Bar(
            printable(part) or "all of the model",
            "tablet",
            count,
            f"{count} device{'' if count == 1 else 's'}",
        )
        for part, count in training.parts.items()
    ]
    return bar_chart("What devices trained last", bars)


# In text.


def _history(found: FleetEvaluations, metric: str) -> Iterable[VersionFigures]:
    stage = _served(found.versions, metric)
    for of in found.versions[:_MOST_ROWS]:
        fleet = {
            each.stage: each for each in of.figures if (each.metric, each.part) == (metric, FLEET)
        }
        received, own, alone = (
            "-" if each not in fleet else shown(fleet[each].value) for each in STAGES
        )
        served = fleet.get(stage)
        yield VersionFigures(
            of.version,
            of.version == found.best,
            of.round,
            received,
            own,
            alone,
            "-" if served is None else shown(served.worst_tenth),
            max((each.devices for each in fleet.values()), default=0),
        )


def _line(each: Figure) -> FigureLine:
    return FigureLine(
        figure_name(each.stage, each.metric),
        printable(part_name(each.part)),
        shown(each.value),
        shown(each.median),
        shown(each.worst_tenth),
        each.devices,
        f"{each.samples:.0f}",
    )


def _round(row: RoundRow) -> RoundLine:
    if row.unfinished:
        made = "open"
    else:
        made = "no version" if row.next_version is None else f"version {row.next_version}"
    metrics = (row.metrics or {}).items()
    return RoundLine(
        row.round,
        made,
        row.expected,
        "-" if row.participants is None else str(row.participants),
        "-" if row.took_seconds is None else span(row.took_seconds),
        ", ".join(f"{printable(name)} {value:.4g}" for name, value in metrics) or "-",
    )


def _costs(training: FleetTraining) -> Iterable[CostLine]:
    for each in training.costs:
        if each.seconds is not None or each.received_bytes is not None:
            yield CostLine(
                each.round,
                each.devices,
                "-" if each.seconds is None else f"{each.seconds:.3g} s",
                "-" if each.received_bytes is None else size(each.received_bytes),
            )


# Two versions.


def _compare(fleet: Fleet, task: str, asked: str) -> ComparedFigures:
    one, comma, other = (each.strip() for each in asked.partition(","))
    numbers = [number_asked(PageQuery((("n", each),)), "n") for each in (one, other)]
    if not comma or numbers[0] is None or numbers[1] is None:
        raise AggregatorError(f"{asked[:40]!r} are no two versions, such as 12,30")
    found = fleet.compare(numbers[0], numbers[1], task)
    pair = found.one, found.other
    figures = [_figures(each) for each in pair]
    return ComparedFigures(
        numbers[0],
        numbers[1],
        tuple((name, said(found.one), said(found.other)) for name, said in _FACTS.items()),
        tuple(
            (printable(name), shown(a), shown(b), _ahead(a, b))
            for name in dict.fromkeys([*figures[0], *figures[1]])
            for a, b in [(figures[0].get(name), figures[1].get(name))]
        ),
        tuple(
            (printable(name), _setting(a), _setting(b)) for name, (a, b) in found.settings.items()
        ),
    )


_FACTS: dict[str, Callable[[ComparedVersion], str]] = {
    "round": lambda each: str(each.row.round) if each.row.round else "-",
    "devices": lambda each: str(each.row.devices),
    "artifact": lambda each: each.row.artifact[:12] or "-",
    "from": lambda each: printable(each.row.origin) or "-",
    "kept": lambda each: "yes" if each.row.kept else "no",
}


def _figures(of: ComparedVersion) -> Mapping[str, float]:
    if of.evaluated is None:
        return of.row.metrics
    found = {}
    for each in of.evaluated.figures:
        of_part = "" if each.part == FLEET else f", {part_name(each.part)}"
        found[f"{figure_name(each.stage, each.metric)}{of_part}"] = each.value
        if each.worst_tenth is not None:
            found[f"{figure_name(each.stage, each.metric)}{of_part}, worst tenth"] = (
                each.worst_tenth
            )
    return found


def _ahead(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{other - one:+.4g}"


def _setting(value: object) -> str:
    return "-" if value is None else printable(str(value))


# To take away.


def _picture(fleet: Fleet, query: PageQuery) -> str:
    view = _read(fleet, query)
    said = query.get("said")
    named = view.rounds_drawn if said else view.quality
    asked = said or query.get("picture") or "quality"
    drawn = next((each.picture for each in named if each.name == asked), None)
    if not drawn:
        raise AggregatorError(f"there is no picture {printable(asked, 40)!r}")
    return drawn.file()


_FIGURES = (
    *("version", "round", "stage", "metric", "part", "devices", "samples", "value", "median"),
    *("worst_tenth", "typical", "over_alone", "over_alone_half_width", "control_devices"),
)


def _figures_file(fleet: Fleet, query: PageQuery) -> str:
    task, _ = task_asked(fleet, query)
    found = fleet.evaluations(task, _MOST_IN_FILE)
    return as_csv(
        _FIGURES,
        (
            [of.version, of.round, *(getattr(each, name) for name in _FIGURES[2:])]
            for of in found.versions
            for each in of.figures
        ),
    )


def _rounds_file(fleet: Fleet, query: PageQuery) -> str:
    task, _ = task_asked(fleet, query)
    rounds = fleet.rounds(task, _MOST_IN_FILE)
    names = sorted({name for each in rounds for name in each.metrics or {}})
    own = ("round", "version", "next_version", "opened_unix_seconds", "took_seconds", "expected")
    return as_csv(
        (*own, "participants", *names),
        (
            [
                *(getattr(each, name) for name in (*own, "participants")),
                *((each.metrics or {}).get(name) for name in names),
            ]
            for each in rounds
        ),
    )


_TAKES = frozenset({"task", "metric", "compare", "said"})
LEARNING = ConsolePage(
    "learning",
    "Learning",
    _read,
    _TAKES | {"picture"},
    files=(
        PageFile("picture.svg", "image/svg+xml", _picture),
        PageFile("figures.csv", "text/csv", _figures_file),
        PageFile("rounds.csv", "text/csv", _rounds_file),
    ),
)
