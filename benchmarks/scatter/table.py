"""The results as tables: a line a row, seeds beneath one another's columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from aggregator.simulate.intervals import paired_difference, spread
from benchmarks.harness import markdown_table
from benchmarks.recommendation.central import Line
from benchmarks.scatter.experiment import Outcome
from benchmarks.scatter.presets import BASELINE

BySeed = Mapping[int, Outcome]
_MEASURES = ("full_hit_ratio", "full_ndcg", "hit_ratio", "ndcg")
_HEADERS = (
    *("", "seeds", "HR@10 of all", "NDCG@10 of all", f"against {BASELINE!r}"),
    *("HR@10 of 99", "NDCG@10 of 99", "bytes up", "bytes down", "ms"),
    *("rounds to 95 %", "KB up to 95 %", "ms to 95 %"),
)


def quality_table(
    outcomes: Mapping[str, BySeed], central: Sequence[Line], down_bytes: Mapping[str, int]
) -> str:
    """Mean and standard deviation over seeds; the paired difference of NDCG@10 among all items to
    the baseline; what a device sends, fetches and computes in a round that it is in, and on the way
    to 95 % of the quality at the end.

    Args:
        outcomes: by row's name, by seed.
        central: recommenders that see everybody's data.
        down_bytes: what a device fetches a round, by row's name.
    """
    baseline = outcomes.get(BASELINE, {})
    lines = []
    for name, by_seed in outcomes.items():
        if not by_seed:
            continue
        found = list(by_seed.values())
        rounds = fmean(one.enough.rounds for one in found)
        took_part = fmean(one.enough.rounds * one.share for one in found)
        up = fmean(one.update_bytes for one in found)
        milliseconds = 1000 * fmean(one.device_seconds for one in found)
        quality = [_spread([getattr(one.last, each) for one in found]) for each in _MEASURES]
        lines.append(
            [
                *(name, len(found), *quality[:2]),
                *("" if name == BASELINE else _difference(by_seed, baseline), *quality[2:]),
                *(f"{up:,.0f}", f"{down_bytes[name]:,}", f"{milliseconds:.2f}"),
                *(f"{rounds:.0f}", f"{took_part * up / 1000:.0f}"),
                f"{took_part * milliseconds:.1f}",
            ]
        )
    for line in central:
        quality = [_spread([getattr(one, each) for one in line.outcomes]) for each in _MEASURES]
        lines.append([line.name, line.seeds, *quality[:2], "", *quality[2:], *[""] * 6])
    return markdown_table(lines, _HEADERS)


def by_class_table(outcomes: Mapping[str, BySeed]) -> str:
    """NDCG@10 among all items of the users on devices of each k_i, mean over seeds."""
    classes = sorted({int(k) for by in outcomes.values() for o in by.values() for k in o.by_class})
    lines = []
    for name, by_seed in outcomes.items():
        found = [outcome.by_class for outcome in by_seed.values()]
        if not found or len(found[0]) < 2:
            continue
        means = [[one[str(k)] for one in found if str(k) in one] for k in classes]
        lines.append([name, *(f"{fmean(each):.4f}" if each else "" for each in means)])
    return markdown_table(lines, ("NDCG@10 of all, of users by k_i", *map(str, classes)))


def curve_table(outcomes: Mapping[str, BySeed]) -> str:
    """NDCG@10 among all items on the way, mean over seeds; rows apart, as their rounds are."""
    lines = []
    for name, by_seed in outcomes.items():
        for points in zip(*(outcome.curve for outcome in by_seed.values()), strict=True):
            mean = fmean(point.full_ndcg for point in points)
            lines.append([name, points[0].rounds, f"{mean:.4f}"])
    return markdown_table(lines, ("", "rounds", "NDCG@10 of all"))


def _spread(values: Sequence[float]) -> str:
    found = spread(values)
    if math.isnan(found.deviation):
        return f"{found.mean:.4f}"
    return f"{found.mean:.4f} ± {found.deviation:.4f}"


def _difference(by_seed: BySeed, baseline: BySeed) -> str:
    shared = sorted(set(by_seed) & set(baseline))
    if not shared:
        return ""
    ours = [by_seed[seed].last.full_ndcg for seed in shared]
    base = [baseline[seed].last.full_ndcg for seed in shared]
    found = paired_difference(ours, base)
    relative = 100 * found.mean / fmean(base)
    if math.isnan(found.half_width):
        return f"{found.mean:+.4f} ({relative:+.1f} %)"
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{found.mean:+.4f} [{low:+.4f}, {high:+.4f}] ({relative:+.1f} %)"
