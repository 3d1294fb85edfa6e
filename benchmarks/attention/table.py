"""The results as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate

from benchmarks.attention.outcome import Outcome
from benchmarks.attention.presets import BEST, OBSERVED
from benchmarks.scatter.statistics import paired_difference, spread

__all__ = ["joining_table", "main_table", "validation_table"]

BySeed = Mapping[int, Outcome]


def main_table(outcomes: Mapping[str, BySeed]) -> str:
    """Mean and deviation over seeds at the round that validation picks, and what it cost.

    ``outcomes``: by row's name, by seed. Times are a device's processor time while it trains.
    """
    best = outcomes.get(BEST, {})
    lines = []
    for name, found in outcomes.items():
        if not found:
            continue
        lines.append(
            (
                name,
                len(found),
                _spread([100 * one.best.accuracy for one in found.values()]),
                _spread([100 * one.best.precision for one in found.values()]),
                "" if name == BEST else _behind(found, best),
                _seconds(found, 0.7),
                _seconds(found, 0.8),
                _mean(found, lambda one: one.down_bytes / 1000),
                _mean(found, lambda one: one.up_bytes / 1000),
                _mean(found, lambda one: 1000 * one.round_seconds),
            )
        )
    headers = (
        *("", "seeds", "accuracy %", "macro precision %", f"{BEST} is ahead by"),
        *("s to 70 %", "s to 80 %", "kB down", "kB up", "ms a round"),
    )
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def joining_table(outcomes: Mapping[str, BySeed]) -> str:
    """Accuracy at the observed station: a line a method, a column a number of stations."""
    cells: dict[str, dict[str, str]] = {}
    for name, found in outcomes.items():
        method, _, count = name.partition(", ")
        if found:
            accuracies = [100 * one.by_device[OBSERVED] for one in found.values()]
            cells.setdefault(method, {})[count] = _spread(accuracies)
    counts = list(dict.fromkeys(name.partition(", ")[2] for name in outcomes))
    lines = [(method, *(row.get(c, "") for c in counts)) for method, row in cells.items()]
    headers = (f"accuracy % at {OBSERVED}, stations:", *counts)
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def validation_table(outcomes: Mapping[str, BySeed]) -> str:
    """Validation accuracy alone, to choose settings by."""
    lines = [
        (
            name,
            len(found),
            _spread([100 * one.best.validation for one in found.values()]),
            _mean(found, lambda one: float(one.best.round_id)),
        )
        for name, found in outcomes.items()
        if found
    ]
    headers = ("", "seeds", "validation %", "round")
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _behind(found: BySeed, best: BySeed) -> str:
    shared = sorted(set(found) & set(best))
    if not shared:
        return ""
    ahead = paired_difference(
        [100 * best[seed].best.accuracy for seed in shared],
        [100 * found[seed].best.accuracy for seed in shared],
    )
    if math.isnan(ahead.half_width):
        return f"{ahead.mean:+.2f}"
    low, high = ahead.mean - ahead.half_width, ahead.mean + ahead.half_width
    return f"{ahead.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _seconds(found: BySeed, accuracy: float) -> str:
    times = [one.seconds_to(accuracy) for one in found.values()]
    reached = [time for time in times if time is not None]
    if len(reached) < len(times):
        return "-" if not reached else f"({len(reached)} of {len(times)} seeds)"
    return f"{sum(reached) / len(reached):.1f}"


def _mean(found: BySeed, value: Callable[[Outcome], float]) -> str:
    return f"{sum(value(one) for one in found.values()) / len(found):,.0f}"


def _spread(values: Sequence[float]) -> str:
    over = spread(values)
    if math.isnan(over.deviation):
        return f"{over.mean:.2f}"
    return f"{over.mean:.2f} ± {over.deviation:.2f}"
