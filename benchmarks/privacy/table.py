"""What was found as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate

from aggregator.simulate.intervals import paired_difference
from benchmarks.privacy.attack import Judgement
from benchmarks.privacy.experiment import DEFAULT, Outcome

BySeed = Mapping[int, Outcome]

_HEADERS = (
    "devices",
    "seeds",
    "HR@10",
    f"against {DEFAULT!r}",
    "rows up",
    "first update, by size",
    "first update, learned",
    "last update, learned",
    "all updates, learned",
)


def attack_table(outcomes: Mapping[str, BySeed]) -> str:
    """Accuracy beside precision / recall / AUC of each attack, means over seeds by row's name."""
    lines = [
        (
            name,
            len(found),
            f"{sum(one.hit_ratio for one in found.values()) / len(found):.4f}",
            _difference(found, outcomes.get(DEFAULT, {})) if name != DEFAULT else "",
            f"{sum(one.update_rows for one in found.values()) / len(found):.0f}",
            _judged(lambda one: one.first_by_size, found),
            _judged(lambda one: one.first, found),
            _judged(lambda one: one.last, found),
            _judged(lambda one: one.every, found),
        )
        for name, found in outcomes.items()
        if found
    ]
    return _table(lines, _HEADERS)


def joining_table(outcomes: Mapping[str, BySeed]) -> str:
    """The attacks on devices that join a trained fleet, by the rounds that they trained before."""
    lines = []
    for name, found in outcomes.items():
        rounds = next(iter(found.values())).joined if found else {}
        for silent in rounds:
            lines.append(
                (
                    name,
                    silent,
                    _judged(lambda one, key=silent: one.joined_by_size[key], found),  # type: ignore[misc]
                    _judged(lambda one, key=silent: one.joined[key], found),  # type: ignore[misc]
                )
            )
    return _table(lines, ("devices", "rounds in silence", "by size", "learned"))


def _table(lines: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _judged(part: Callable[[Outcome], Judgement], found: BySeed) -> str:
    judged = [part(one) for one in found.values()]
    parts = [[one.precision for one in judged], [one.recall for one in judged]]
    ranked = [one.auc for one in judged if one.auc is not None]
    return " / ".join(f"{sum(part) / len(part):.3f}" for part in (*parts, ranked) if part)


def _difference(found: BySeed, baseline: BySeed) -> str:
    shared = sorted(set(found) & set(baseline))
    if not shared:
        return ""
    difference = paired_difference(
        [found[seed].hit_ratio for seed in shared], [baseline[seed].hit_ratio for seed in shared]
    )
    if math.isnan(difference.half_width):
        return f"{difference.mean:+.4f}"
    low = difference.mean - difference.half_width
    return f"{difference.mean:+.4f} [{low:+.4f}, {2 * difference.mean - low:+.4f}]"
