"""Quality against what a device has sent, drawn from stored outcomes; no data set is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.recommendation.central import Line
from benchmarks.scatter.table import BySeed


def draw_bytes(file: Path, outcomes: Mapping[str, BySeed], central: Sequence[Line]) -> None:
    """NDCG@10 among all items over a device's kilobytes up, means over seeds, into ``file``.

    ``central``: recommenders that see everybody's data, as levels.
    """
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for name, by_seed in outcomes.items():
        curves = [one for one in by_seed.values() if one.update_bytes]
        if curves:
            points = list(zip(*(one.curve for one in curves), strict=True))
            sent = fmean(one.share * one.update_bytes for one in curves) / 1000
            kilobytes = [sent * at[0].rounds for at in points]
            quality = [fmean(each.full_ndcg for each in at) for at in points]
            axes.plot(kilobytes, quality, label=name, marker="o", markersize=2.5, linewidth=1.2)
    for place, line in enumerate(central):
        level = line.mean("full_ndcg")
        axes.axhline(level, color="0.6", linestyle="--", linewidth=0.8)
        axes.annotate(
            line.name,
            (1 - 0.3 * place, level),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=7,
        )
    axes.set(
        xscale="log", xlabel="kilobytes that a device has sent", ylabel="NDCG@10 among all items"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
