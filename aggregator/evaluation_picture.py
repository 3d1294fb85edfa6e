"""A task's figures by version as a picture, fleet and control arm over each other."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from aggregator.evaluation import FLEET, compared, ends_of
from aggregator.store.evaluations import EvaluatedVersion
from device_sdk.evaluation.report import STAGES

_SHOWN = {
    "global": "the model that devices receive",
    "personal": "their own, after training",
    "alone": "the control arm's, trained alone",
}


def draw(found: Sequence[EvaluatedVersion], metric: str, said: str, path: Path) -> None:
    """The fleet's figures of a metric by version and, where there is a control arm, what federation
    brings with its 95 % interval; above them what is ``said`` of it. Raises ImportError where
    matplotlib is missing."""
    from matplotlib.figure import Figure

    versions = sorted(found, key=lambda each: each.version)
    told = [(each.version, compared(each.figures, metric)) for each in versions]
    brings = [
        (number, figure.over_alone, *ends_of(figure.over_alone, figure.over_alone_half_width))
        for number, figure in told
        if figure is not None and not math.isnan(figure.over_alone_half_width)
    ]
    picture = Figure(figsize=(5 * (1 + bool(brings)), 3.8), layout="constrained", dpi=120)
    axes = picture.subplots(1, 1 + bool(brings), squeeze=False)[0]
    for stage in STAGES:
        values = [
            (each.version, figure.value)
            for each in versions
            for figure in each.figures
            if (figure.stage, figure.metric, figure.part) == (stage, metric, FLEET)
        ]
        if values:
            dashed = "--" if stage == "alone" else "-"
            axes[0].plot(*zip(*values, strict=True), dashed, marker=".", label=_SHOWN[stage])
    axes[0].set(xlabel="version", ylabel=metric)
    axes[0].legend(frameon=False, fontsize=8)
    if brings:
        x, mean, low, high = zip(*brings, strict=True)
        axes[1].fill_between(x, low, high, alpha=0.2, linewidth=0)
        axes[1].plot(x, mean, marker=".")
        axes[1].axhline(0, color="0.5", linewidth=0.8)
        axes[1].set(xlabel="version", ylabel=f"{metric} ahead of alone")
    picture.suptitle(textwrap.fill(said, 90 if brings else 60), fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
