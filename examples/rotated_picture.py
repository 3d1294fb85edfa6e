"""The picture of the rotated digits: what each device sees, and what it learns of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

_SHOWN = 6


def draw_picture(
    path: Path,
    images: Mapping[str, NDArray[np.float32]],
    curves: Mapping[str, Sequence[tuple[int, float, float]]],
    alone: Mapping[str, tuple[float, float]],
) -> Path:
    """Write a PNG and return its path.

    Args:
        images: by device, [n, 1, height, width]; the first few are shown.
        curves: by device, (round, accuracy on its own rotation, on the others) in percent.
        alone: by device, the same two of a network that trained alone.
    """
    names = list(images)
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(3.2 * len(names), 5.2), height_ratios=(1, 2.2), squeeze=False
    )
    for place, name in enumerate(names):
        shown = images[name][:_SHOWN, 0]
        top, below = axes[0][place], axes[1][place]
        top.imshow(np.concatenate(list(shown), axis=1), cmap="gray_r")
        top.set_title(name)
        top.set_axis_off()
        rounds = [row[0] for row in curves[name]]
        for column, (label, colour) in enumerate(
            (("own rotation", "tab:blue"), ("other rotations", "tab:orange"))
        ):
            values = [row[column + 1] for row in curves[name]]
            below.plot(rounds, values, color=colour, label=label)
            below.axhline(alone[name][column], color=colour, linestyle=":", linewidth=1)
        below.set_ylim(0, 100)
        below.set_xlabel("round")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        if place == 0:
            below.set_ylabel("accuracy, % (dotted: alone)")
            below.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
