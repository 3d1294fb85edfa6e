"""Runs added up, as a table in Markdown and as a line for each run in a file of results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.chaos import RunResult, RunSettings
from tests.faults.holding import KillCost
from tests.faults.wire_faults import WireFault

_COLUMNS = {
    "mosquitto": "Mosquitto",
    "mosquitto-persistent": "with persistence",
    "amqtt": "amqtt",
    "postgres, sums": "PostgreSQL, sums",
    "postgres, bodies": "PostgreSQL, bodies",
    "sqlite, sums": "SQLite, sums",
    "sqlite, bodies": "SQLite, bodies",
    "machines": "on machines",
    "ray": "under Ray",
}
_WIRE = frozenset(fault.value for fault in WireFault)
_SERVERS = ("aggregator", "coordinator", "worker", "store", "commit", "Ray", "a Ray")
"""What the kinds of faults begin with that befall whatever serves."""


def _of_servers(kind: str) -> bool:
    return kind.startswith(_SERVERS)


_GROUPS: dict[str, Callable[[str], bool]] = {
    "of servers, store and network": _of_servers,
    "of devices, brokers and clocks": lambda kind: not _of_servers(kind) and kind not in _WIRE,
    "of the wire": lambda kind: kind in _WIRE,
}
_REST = " | | |"


def where(settings: RunSettings) -> str:
    """The column that a run is added to."""
    return _column(asdict(settings))


def _column(settings: Mapping[str, object]) -> str:
    if "store" not in settings:
        return str(settings["broker"])
    if settings["ray"] or settings["machines"]:
        return "ray" if settings["ray"] else "machines"
    return f"{settings['store']}, {'sums' if settings['adds_up'] else 'bodies'}"


def append_result(path: Path, settings: RunSettings, result: RunResult) -> None:
    """Add a run's figures to a file, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": {k: v for k, v in asdict(settings).items() if k != "rates"},
        "faults": dict(result.faults),
        "struck": {
            kind: sum(result.judgement.counted_in.get(number, 0) for number in rounds)
            for kind, rounds in result.struck.items()
        },
        "costs": [asdict(cost) for cost in result.costs],
        "between": [list(astuple(cost)) for cost in result.between],
        "judgement": asdict(result.judgement),
        "sends": result.sends,
        "arrivals": result.arrivals,
        "suppressed": result.suppressed,
        "seconds": round(result.seconds, 1),
        "living_rounds": result.living_rounds,
    }
    with path.open("a") as file:
        file.write(json.dumps(record, sort_keys=True) + "\n")


def read_results(path: Path) -> list[dict[str, object]]:
    """The runs in a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(results: Sequence[Mapping[str, object]]) -> str:
    """What was injected and what became of the updates: a column for each broker, or store, one for
    all."""
    played = {_column(result["settings"]) for result in results}  # type: ignore[arg-type]
    columns = [name for name in _COLUMNS if name in played]
    by_broker: dict[str, Counter[str]] = {name: Counter() for name in columns}
    faults: dict[str, Counter[str]] = {name: Counter() for name in columns}
    for result in results:
        broker = _column(result["settings"])  # type: ignore[arg-type]
        judgement: dict[str, object] = result["judgement"]  # type: ignore[assignment]
        receipted: dict[str, int] = judgement["receipted"]  # type: ignore[assignment]
        faults[broker].update(result["faults"])  # type: ignore[call-overload]
        by_broker[broker].update(
            {
                "runs": 1,
                "minutes": round(float(result["seconds"]) / 60, 1),  # type: ignore[arg-type, dict-item]
                "rounds closed": judgement["rounds"],  # type: ignore[dict-item]
                "versions made": judgement["versions"],  # type: ignore[dict-item]
                "updates": judgement["trained"],  # type: ignore[dict-item]
                "sends of them": result["sends"],  # type: ignore[dict-item]
                "arrivals": result["arrivals"],  # type: ignore[dict-item]
                "duplicates suppressed": result["suppressed"],  # type: ignore[dict-item]
                "still in an outbox": judgement["waiting"],  # type: ignore[dict-item]
                "lost": judgement["lost"],  # type: ignore[dict-item]
                "counted twice": judgement["twice"],  # type: ignore[dict-item]
                "counted in a later round": judgement.get("late", 0),  # type: ignore[dict-item]
                **{f"receipted {verdict}": count for verdict, count in receipted.items()},
            }
        )
    struck = Counter[str]()
    lost, twice = Counter[str](), Counter[str]()
    for result in results:
        judged: dict[str, int] = result["judgement"]  # type: ignore[assignment]
        found: dict[str, int] = result["struck"]  # type: ignore[assignment]
        struck.update(found)
        lost.update(dict.fromkeys(found, judged["lost"]))
        twice.update(dict.fromkeys(found, judged["twice"]))
    titles = "".join(f" {_COLUMNS[name]} |" for name in columns)
    lines = [
        f"| |{titles} all | counted meanwhile | lost | twice |",
        f"|---|{'--:|' * len(columns)}--:|--:|--:|--:|",
    ]
    kinds = sorted(set().union(*faults.values()), key=lambda k: -sum(f[k] for f in faults.values()))
    for group, belongs in _GROUPS.items():
        of_group = [kind for kind in kinds if belongs(kind)]
        for kind in of_group:
            row = _row(kind, [faults[name][kind] for name in columns])
            lines.append(f"{row} {struck[kind]:,} | {lost[kind]} | {twice[kind]} |")
        if of_group:
            totals = [sum(faults[name][kind] for kind in of_group) for name in columns]
            lines.append(_row(f"**{group}**", totals, bold=True) + " | | |")
    lines.append(_row("**faults**", [faults[name].total() for name in columns], bold=True) + _REST)
    for what in (
        "runs",
        "minutes",
        "rounds closed",
        "versions made",
        "updates",
        "sends of them",
        "arrivals",
        "duplicates suppressed",
        "receipted counted",
        "counted in a later round",
        "receipted late",
        "receipted refused",
        "receipted conflict",
        "receipted forgotten",
        "still in an outbox",
    ):
        values = [by_broker[name][what] for name in columns]
        if any(values) or what == "still in an outbox":
            lines.append(_row(what, values) + _REST)
    for what in ("lost", "counted twice"):
        values = [by_broker[name][what] for name in columns]
        lines.append(_row(f"**{what}**", values, bold=True) + _REST)
    return "\n".join(lines)


def living(results: Sequence[Mapping[str, Any]]) -> str:
    """How soon each device was counted again, in words."""
    if not results:
        return ""
    devices = sum(result["settings"]["devices"] for result in results)
    rounds = [result["living_rounds"] for result in results]
    return (
        f"after the last fault of each run all of its devices were counted again, {devices:,} in "
        f"{len(rounds):,} runs: within {np.median(rounds):g} rounds (median), {max(rounds)} (most)"
    )


def kill_costs(results: Sequence[Mapping[str, Any]]) -> str:
    """What workers that were killed had taken in and not committed, and what they would have had at
    the moments between; empty where nothing was read."""
    killed = [KillCost(**each) for result in results for each in result["costs"]]
    between = [KillCost(*each) for result in results for each in result["between"]]
    lines = []
    for undisturbed, when in ((True, "with nothing else the matter"), (False, "kept from it")):
        for costs, what in ((killed, "killed workers"), (between, "moments of living workers")):
            chosen = [each for each in costs if each.undisturbed is undisturbed]
            held = sorted(each.oldest_seconds for each in chosen if each.oldest_seconds)
            if not held:
                continue
            long = [each for each in chosen if each.oldest_seconds > 1.0]
            lines.append(
                f"{len(chosen):,} {what} {when}: {len(held):,} had updates without a commit, the "
                f"oldest for {np.median(held):.2f} s (median), {np.quantile(held, 0.99):.2f} s "
                f"(99 in 100) and {held[-1]:.2f} s (longest); {len(long):,} for more than a second"
            )
            if long:
                waited = np.median([each.waited_seconds / each.oldest_seconds for each in long])
                commit = np.median([each.commit_seconds for each in long])
                lines[-1] += (
                    f", {waited:.0%} of which one thread had no processor, and a bystander's "
                    f"commit of one row took {commit:.2f} s (medians)"
                )
    return "\n".join(lines)


def split(faults: Mapping[str, int]) -> str:
    """How many of each group, in words."""
    counts = {
        group: sum(count for kind, count in faults.items() if belongs(kind))
        for group, belongs in _GROUPS.items()
    }
    return ", ".join(f"{count:,} {group}" for group, count in counts.items())


def _row(label: str, values: Sequence[float], bold: bool = False) -> str:
    cells = [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in values]
    total = sum(values)
    cells.append(f"{total:,.1f}" if isinstance(total, float) else f"{total:,}")
    return f"| {label} | " + " | ".join(f"**{c}**" if bold else c for c in cells) + " |"
