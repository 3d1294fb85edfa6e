"""The results as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate

from aggregator.simulate.intervals import paired_difference, spread
from benchmarks.attention.experiment import Outcome
from benchmarks.attention.rows import BEST, KINDS, OBSERVED

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


def main_caption(every: int) -> str:
    """What the main table's times and bytes are; ``every``: rounds between evaluations."""
    return (
        f"Times are those of the first evaluation at the accuracy or above, one every {every} "
        "rounds, not interpolated.\n"
        "Bytes are those of the encoded arrays, without seals and padding."
    )


def joining_accuracies(outcomes: Mapping[str, BySeed]) -> dict[str, dict[int, list[float]]]:
    """Accuracies % at the observed station, one a seed, by method and number of stations."""
    accuracies: dict[str, dict[int, list[float]]] = {}
    for name, found in outcomes.items():
        method, _, count = name.partition(", ")
        if found:
            values = [100 * one.by_device[OBSERVED] for one in found.values()]
            accuracies.setdefault(method, {})[int(count)] = values
    return accuracies


def joining_table(outcomes: Mapping[str, BySeed]) -> str:
    """Accuracy at the observed station: a line a method, a column a number of stations."""
    found = joining_accuracies(outcomes)
    counts = sorted({count for by_count in found.values() for count in by_count})
    lines = [
        (method, *(_spread(by_count[c]) if c in by_count else "" for c in counts))
        for method, by_count in found.items()
    ]
    headers = (f"accuracy % at {OBSERVED}, stations:", *(str(count) for count in counts))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def known_table(outcomes: Mapping[str, BySeed]) -> str:
    """Accuracy by what devices' pictures show: a line a method, those told apart first."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, by_seed in outcomes.items():
        method, _, among = name.partition(", ")
        for kind, devices in KINDS.items():
            if among not in (kind, "all") or not by_seed:
                continue
            line = method if among == "all" else f"{method}, told apart"
            found.setdefault(line, {})[kind] = [
                100 * sum(one.by_device[device] for device in devices) / len(devices)
                for one in by_seed.values()
            ]
    lines = [
        (line, *(_spread(by_kind[kind]) if kind in by_kind else "" for kind in KINDS))
        for line, by_kind in found.items()
    ]
    headers = ("accuracy %", *(f"{len(devices)} with {k}" for k, devices in KINDS.items()))
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
