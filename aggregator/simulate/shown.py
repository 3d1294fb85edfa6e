"""Records as tables and pictures, and what figures over seeds amount to."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from aggregator.clock import moment_of
from aggregator.evaluation import FLEET, figure_name, shown
from aggregator.intervals import Interval, interval
from aggregator.operate.runs import RunSummary, SimulationRecord, differing
from device_sdk.evaluation.report import STAGES
from device_sdk.system.printable import printable

_KEPT = {
    "round": "number",
    **{key: key for key in ("selected", "counted", "late", "silent", "crashed")},
    **{key: key for key in ("down_bytes", "up_bytes", "began_seconds", "seconds")},
}
"""Columns of a CSV file, by the names in a record."""
_OF_A_ROUND = (*_KEPT, "failed", "refused")
_MOST_SPELT = 40
_MOST_LINES = 24
_MOST_COLUMNS = 4
_MOST_BESIDE = 4
_MOST_SEEDS = 3
_MOST_FAULT = 160


def rounds_table(record: SimulationRecord) -> str:
    """A record's rounds: means over its seeds, and all of them where they are few."""
    metrics = record.metrics[:_MOST_COLUMNS]
    longest = max((len(record.rounds(run)) for run in range(len(record.runs))), default=0)
    lines = [_round_line(record, place, metrics) for place in _some(longest, _MOST_LINES)]
    newest = {"round": "after"}
    for metric in metrics:
        values = [_newest(record, run, metric) for run in range(len(record.runs))]
        newest[metric] = _mean([each for each in values if each is not None])
    if metrics and any(newest[metric] != "-" for metric in metrics):
        lines.append(newest)
    popular = {"round": "popular"}
    for metric in metrics:
        found = record.popularity(metric)
        popular[metric] = _mean(found)
    if any(popular[metric] != "-" for metric in metrics):
        lines.append(popular)
    return tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True)


def parts_table(record: SimulationRecord) -> str:
    """How good the newest version is by what devices trained (a rung, an artifact, k), and on how
    many; empty where they all trained the same or nobody evaluated. Means over the seeds."""
    metrics = record.metrics[:_MOST_COLUMNS]
    found: dict[str, dict[str, list[float]]] = {}
    for run in record.runs:
        last = next(filter(None, (each["figures"] for each in run["rounds"][::-1])), ())
        newest = run.get("newest", {"figures": []})["figures"]
        own = [each for each in last if each["stage"] != STAGES[0]]
        for each in (*newest, *own):
            if each["part"] in (None, FLEET) or each["value"] is None:
                continue
            line = found.setdefault(each["part"], {})
            name = figure_name(each["stage"], each["metric"])
            line.setdefault(name, []).append(float(each["value"]))
            if name in metrics[:1]:
                line.setdefault("devices", []).append(float(each["devices"]))
    lines = [
        {
            "trains": printable(part),
            "devices": f"{np.mean(line['devices']):.3g}" if "devices" in line else "-",
            **{metric: _mean(line.get(metric, [])) for metric in metrics},
        }
        for part, line in found.items()
    ]
    if len(lines) < 2:
        return ""
    return tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True)


def _round_line(record: SimulationRecord, place: int, metrics: Sequence[str]) -> dict[str, str]:
    runs = range(len(record.runs))
    played = [record.rounds(run)[place] for run in runs if place < len(record.rounds(run))]

    def mean(key: str) -> float:
        return float(np.mean([each[key] for each in played]))

    selected = max(1.0, mean("selected"))
    line = {
        "round": str(place + 1),
        "selected": f"{mean('selected'):.0f}",
        "counted": f"{mean('counted'):.0f}",
        "late": f"{mean('late'):.0f}",
        "away": f"{mean('silent') + mean('crashed'):.0f}",
        "failed": f"{np.mean([_failures(each) for each in played]):.0f}",
        "ends at": duration(mean("began_seconds") + mean("seconds")),
        "down": size(mean("down_bytes") / selected),
        "up": size(mean("up_bytes") / max(1.0, mean("counted") + mean("late"))),
    }
    for metric in metrics:
        figures = [record.figures_of(each).get(metric) for each in played]
        line[metric] = _mean([each for each in figures if each is not None])
    return line


def runs_table(records: Sequence[SimulationRecord]) -> str:
    """One line a record: the last and the best figure of each, over its seeds."""
    lines = []
    for record in records:
        ranking = record.ranking
        line = {
            "run": record.name,
            "method": record.method,
            "devices": str(record.devices),
            "seeds": str(len(record.runs)),
            "rounds": "/".join(
                sorted({str(len(record.rounds(run))) for run in range(len(record.runs))}, key=int)
            ),
        }
        if ranking is not None:
            runs = range(len(record.runs))
            curves = [record.points(run, ranking.metric) for run in runs]
            best = [each for run in runs if (each := record.best(run)) is not None]
            line["figure"] = ranking.metric
            line["last"] = _mean([points[-1].value for points in curves if points])
            line["best"] = _mean([each.value for each in best])
            if any(each.popularity(each.ranking.metric) for each in records if each.ranking):
                line["popular"] = _mean(record.popularity(ranking.metric))
            line["best after"] = _mean([float(each.after) for each in best])
        lines.append({**line, **_costs(record)})
    return tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True)


def _costs(record: SimulationRecord) -> dict[str, str]:
    played = [each for run in range(len(record.runs)) for each in record.rounds(run)]
    seeds = max(1, len(record.runs))
    down = sum(each["down_bytes"] for each in played) / seeds / record.devices
    up = sum(each["up_bytes"] for each in played) / seeds / record.devices
    ends = [
        each[-1]["began_seconds"] + each[-1]["seconds"]
        for run in range(len(record.runs))
        if (each := record.rounds(run))
    ]
    return {
        "down a device": size(down),
        "up a device": size(up),
        "virtual time": duration(float(np.mean(ends))) if ends else "-",
        "state": record.state,
    }


def differences(records: Sequence[SimulationRecord]) -> str:
    """In which settings, options and versions records differ, a line each, or a column each."""
    found = differing(records)
    lines = [
        [printable(name), *("-" if each is None else _spelt(each) for each in said)]
        for name, said in found.items()
    ]
    if len(records) > _MOST_BESIDE:  # a line a run, and a column for each that differs
        names, *rows = zip(*lines, strict=True) if lines else [()]
        lines = [[each.name, *row] for each, row in zip(records, rows, strict=False)]
        return tabulate(lines, ["run", *names], tablefmt="plain", disable_numparse=True)
    if not lines:
        return "They differ in no setting: the same task, options, seeds and versions."
    head = ["what differs", *(each.name for each in records)]
    return tabulate(lines, headers=head, tablefmt="plain", disable_numparse=True)


def _spelt(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= _MOST_SPELT else f"{text[: _MOST_SPELT - 3]}...")


def settings_table(record: SimulationRecord) -> str:
    """Every setting, option and version that a run was made with, by name."""
    lines = [[printable(name), _spelt(value)] for name, value in record.settings.items()]
    return tabulate(lines, ["setting", "in force"], tablefmt="plain", disable_numparse=True)


def summaries_table(found: Sequence[RunSummary]) -> str:
    """A line a run, those that are damaged among them."""
    lines = [
        {
            "run": printable(each.name),
            "began": moment_of(each.unix_seconds),
            "method": each.method or "-",
            "devices": str(each.devices or "-"),
            "seeds": str(len(each.seeds)),
            "rounds": _several(each.rounds),
            "figure": printable(each.metric) or "-",
            "last": _figure(each.last),
            "best": _figure(each.best),
            "of version": _several(each.best_versions),
            "state": printable(each.state),
            "other than usual": _changed(each),
        }
        for each in found
    ]
    return tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True)


def _several(numbers: Sequence[int]) -> str:
    """What seeds have in common, or apart."""
    told = list(dict.fromkeys(map(str, numbers)))
    return "/".join([*told[:_MOST_SEEDS], *(["..."] if len(told) > _MOST_SEEDS else [])]) or "-"


def _changed(of: RunSummary) -> str:
    if of.fault:
        return printable(of.fault[:_MOST_FAULT])
    said = (f"{key}={'' if value is None else _spelt(value)}" for key, value in of.changed.items())
    return printable(" ".join(said)) or "-"


def write_csv(path: Path, records: Sequence[SimulationRecord]) -> None:
    """A line for each round of each run and seed; behind them those of the newest version, whose
    round is called ``after``, and of the most popular items, ``popular``."""
    metrics = list(dict.fromkeys(metric for each in records for metric in each.metrics))
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, ["run", "seed", *_OF_A_ROUND, *metrics])
        lines.writeheader()
        for record in records:
            for place, run in enumerate(record.runs):
                begin = {"run": record.name, "seed": run["seed"]}
                for each in record.rounds(place):
                    held = {name: each[key] for name, key in _KEPT.items()}
                    counts = {key: sum(each[key].values()) for key in ("failed", "refused")}
                    lines.writerow({**begin, **held, **counts, **record.figures_of(each)})
                for name, key in (("after", "newest"), ("popular", "popularity")):
                    found = record.figures_of(run.get(key, {"figures": []}))
                    if found:
                        lines.writerow({**begin, "round": name, **found})


def draw(records: Sequence[SimulationRecord], path: Path) -> None:
    """The figures of all records over each other, and what each cost. Raises ImportError where
    matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    metrics = list(dict.fromkeys(metric for each in records for metric in each.metrics[:2]))[:2]
    controlled = any(r.over_alone(run) for r in records for run in range(len(r.runs)))
    count = len(metrics) + controlled + 2
    figure, axes = pyplot.subplots(1, count, figsize=(4 * count, 3.6), layout="constrained")
    for axis, metric in zip(axes, metrics, strict=False):
        for number, record in enumerate(records):
            _draw_curve(axis, record, metric, f"C{number}")
        popular = [each for record in records for each in record.popularity(metric)]
        if popular:
            axis.axhline(np.mean(popular), color="0.5", linestyle=":", label="popular")
            axis.annotate("popular", (0, np.mean(popular)), color="0.4", fontsize=8)
        axis.set(xlabel="rounds played", ylabel=metric)
    for number, record in enumerate(records if controlled else ()):
        _draw_over_alone(axes[len(metrics)], record, f"C{number}")
    for number, record in enumerate(records):
        runs = [record.rounds(run) for run in range(len(record.runs))]
        longest = max(runs, key=len, default=[])
        numbers = [each["number"] for each in longest]
        axes[-2].plot(
            numbers, [each["counted"] for each in longest], f"C{number}", label=record.name
        )
        total = np.cumsum([each["up_bytes"] + each["down_bytes"] for each in longest])
        axes[-1].plot(numbers, total / 1e6 / record.devices, f"C{number}")
    axes[-2].set(xlabel="round", ylabel="updates counted")
    axes[-2].set_ylim(bottom=0)
    axes[-1].set(xlabel="round", ylabel="MB a device, down and up")
    figure.legend(
        [Line2D([], [], color=f"C{number}") for number in range(len(records))],
        [each.name for each in records],
        loc="outside upper center",
        ncols=min(4, len(records)),
        frameon=False,
    )
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_curve(axis: Any, record: SimulationRecord, metric: str, colour: str) -> None:
    """The mean over the seeds, and its 95 % interval as a band."""
    by_round: dict[int, list[float]] = {}
    for run in range(len(record.runs)):
        for each in record.points(run, metric):
            by_round.setdefault(each.after, []).append(each.value)
    if not by_round:
        return
    x = sorted(by_round)
    found = [interval(by_round[after]) for after in x]
    mean = np.array([spread.mean for spread in found])
    half = np.nan_to_num([spread.half_width for spread in found])
    axis.plot(x, mean, colour, marker="." if len(x) < 20 else None, label=record.name)
    if half.any():
        axis.fill_between(x, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)


def _draw_over_alone(axis: Any, record: SimulationRecord, colour: str) -> None:
    """What federation brings, with its interval over the devices: of the first run."""
    found = record.over_alone(0)
    x = sorted(found)
    mean, low, high = np.array([found[each][1:] for each in x]).reshape(len(x), 3).T
    axis.plot(x, mean, colour, marker="." if len(x) < 20 else None)
    axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.set(xlabel="rounds played", ylabel="better than the same devices alone by")


def _newest(record: SimulationRecord, run: int, metric: str) -> float | None:
    return record.figures_of(record.runs[run].get("newest", {"figures": []})).get(metric)


def _mean(values: Sequence[float]) -> str:
    """A mean, with half of its 95 % interval where there are several."""
    if not values:
        return "-"
    return _figure(interval(values))


def _figure(found: Interval | None) -> str:
    if found is None:
        return "-"
    if math.isnan(found.half_width):
        return shown(found.mean)
    return f"{shown(found.mean)} ± {found.half_width:.2g}"


def _some(count: int, most: int) -> list[int]:
    """Places out of so many, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(each) for each in np.linspace(0, count - 1, most)})


def _failures(played: Mapping[str, Any]) -> int:
    return int(sum(played["failed"].values()) + sum(played["refused"].values()))


def duration(seconds: float) -> str:
    """Virtual time in two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    hours = whole // 3600
    if hours < 48:
        return f"{hours}h {whole % 3600 // 60:02}m"
    return f"{hours // 24}d {hours % 24:02}h"


def size(count: float) -> str:
    """Bytes in a unit that suits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
