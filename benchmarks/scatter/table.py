"""The results as a table: a line a row, seeds beneath one another's columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from aggregator.simulate.intervals import paired_difference, spread
from benchmarks.scatter.experiment import Outcome
from benchmarks.scatter.presets import BASELINE

_HEADERS = (
    "fleet",
    "seeds",
    "HR@10",
    "NDCG@10",
    "HR@10 full",
    "NDCG@10 full",
    f"HR@10 against {BASELINE!r}",
    "rows up",
    "bytes up",
    "bytes down",
)


def quality_table(
    outcomes: Mapping[str, Mapping[int, Outcome]], down_bytes: Mapping[str, int]
) -> str:
    """Mean and standard deviation over seeds, and the paired difference to the baseline.

    Args:
        outcomes: by row's name, by seed.
        down_bytes: what a device fetches a round, by row's name; rows without encodings have none.
            Bytes up are those of an update.
    """
    lines = []
    baseline = outcomes.get(BASELINE, {})
    for name, by_seed in outcomes.items():
        if not by_seed:
            continue
        ends = [outcome.last for outcome in by_seed.values()]
        lines.append(
            (
                name,
                len(ends),
                _spread([end.hit_ratio for end in ends]),
                _spread([end.ndcg for end in ends]),
                _spread([end.full_hit_ratio for end in ends]),
                _spread([end.full_ndcg for end in ends]),
                "" if name == BASELINE else _difference(by_seed, baseline),
                f"{_mean([one.update_rows for one in by_seed.values()]):.0f}",
                _bytes(_mean([one.update_bytes for one in by_seed.values()])),
                _bytes(down_bytes.get(name, 0)),
            )
        )
    return tabulate(lines, headers=_HEADERS, tablefmt="github", disable_numparse=True)


def by_class_table(outcomes: Mapping[str, Mapping[int, Outcome]]) -> str:
    """HR@10 of the users on devices of each k_i, mean over seeds."""
    classes = sorted({int(k) for by in outcomes.values() for o in by.values() for k in o.by_class})
    lines = []
    for name, by_seed in outcomes.items():
        found = [outcome.by_class for outcome in by_seed.values()]
        if not found or len(found[0]) < 2:
            continue
        means = (_mean([one[str(k)] for one in found if str(k) in one]) for k in classes)
        lines.append((name, *(f"{mean:.3f}" for mean in means)))
    headers = ("HR@10 of users by k_i", *(str(k) for k in classes))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def passes_table(outcomes: Mapping[str, Mapping[int, Outcome]]) -> str:
    """NDCG@10 after so many passes over the fleet, mean over seeds, and the passes of the best.

    Rates fall by the pass, whatever the number of passes, so that a point of a longer run is what a
    run that ends there finds.
    """
    curves = {
        name: {
            points[0].epoch: _mean([point.ndcg for point in points])
            for points in zip(*(outcome.curve for outcome in by_seed.values()), strict=True)
        }
        for name, by_seed in outcomes.items()
        if by_seed
    }
    epochs = sorted({epoch for curve in curves.values() for epoch in curve})
    lines = [
        (
            name,
            len(outcomes[name]),
            max(curve, key=lambda epoch: curve[epoch]),
            *(f"{curve[epoch]:.4f}" if epoch in curve else "" for epoch in epochs),
        )
        for name, curve in curves.items()
    ]
    headers = ("NDCG@10 after passes", "seeds", "best", *map(str, epochs))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(values: Sequence[float]) -> str:
    found = spread(values)
    if math.isnan(found.deviation):
        return f"{found.mean:.4f}"
    return f"{found.mean:.4f} ± {found.deviation:.4f}"


def _difference(by_seed: Mapping[int, Outcome], baseline: Mapping[int, Outcome]) -> str:
    shared = sorted(set(by_seed) & set(baseline))
    if not shared:
        return ""
    ours = [by_seed[seed].last.hit_ratio for seed in shared]
    base = [baseline[seed].last.hit_ratio for seed in shared]
    found = paired_difference(ours, base)
    relative = 100 * found.mean / _mean(base)
    if math.isnan(found.half_width):
        return f"{found.mean:+.4f} ({relative:+.1f} %)"
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{found.mean:+.4f} [{low:+.4f}, {high:+.4f}] ({relative:+.1f} %)"


def _bytes(count: float) -> str:
    """Blank for none: arrays were handed over, which is not the same as sending nothing."""
    return f"{count:,.0f}" if count else ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
