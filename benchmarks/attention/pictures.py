"""Figures 5 and 6 of papers/fedamn, drawn from stored outcomes; no data set is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot

from aggregator.simulate.intervals import spread
from benchmarks.attention.experiment import Outcome, Scores
from benchmarks.attention.rows import OBSERVED
from benchmarks.attention.table import BySeed, joining_accuracies
from benchmarks.datasets.air import SUBURBS
from benchmarks.datasets.vmnist import VARIANTS
from device_sdk.methods.attention.mixer import AttentionScores
from examples.attention_picture import Moment, draw_attention


def device_groups(data: str, names: Collection[str]) -> dict[str, str]:
    """Each device's group, V-MNIST's variant or the city and its suburbs, in the fleet's order.

    A stored outcome names its devices in no order, and has weights in the fleet's.
    """
    if data != "vmnist":
        return {name: "suburbs" if name in SUBURBS else "city" for name in sorted(names)}
    variant = {name: name.partition(".")[0] for name in names}
    order: list[str] = list(VARIANTS)
    return {n: variant[n] for n in sorted(names, key=lambda n: (order.index(variant[n]), n))}


def moment_of(scores: Scores, names: Collection[str]) -> Moment:
    """What a round's scores say of each device; ``names`` in the fleet's order."""
    senders = tuple(names)
    return {
        name: AttentionScores(
            scores.round_id,
            senders,
            np.asarray([weights], np.float32),
            np.asarray([[share, 1 - share]], np.float32),
        )
        for name, weights, share in zip(senders, scores.first, scores.second, strict=True)
    }


def draw_listening(path: Path, data: str, outcome: Outcome) -> Path:
    """Figure 5: whom each device listens to, in an early round and in the last, group by group.

    Returns the path of the PNG; raises ValueError for an outcome without scores.
    """
    if not outcome.scores:
        raise ValueError("nobody mixes in this run: there are no scores to draw")
    groups = device_groups(data, outcome.by_device)
    moments = [moment_of(scores, groups) for scores in outcome.scores]
    return draw_attention(path, moments, {name: name for name in groups}, groups)


def draw_joining(path: Path, outcomes: Mapping[str, BySeed]) -> Path:
    """Figure 6: accuracy at the observed station as others join, a line a method.

    Means over seeds with their deviation; returns the path of the PNG.
    """
    figure, axes = pyplot.subplots(figsize=(6, 4))
    accuracies = joining_accuracies(outcomes)
    for method, found in accuracies.items():
        over = {count: spread(values) for count, values in sorted(found.items())}
        axes.errorbar(
            list(over),
            [one.mean for one in over.values()],
            [np.nan_to_num(one.deviation) for one in over.values()],
            marker="o",
            capsize=3,
            label=method,
        )
    axes.set_xticks(sorted({count for found in accuracies.values() for count in found}))
    axes.set_xlabel("stations that take part")
    axes.set_ylabel(f"accuracy % at {OBSERVED}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
