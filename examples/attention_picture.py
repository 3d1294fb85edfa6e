"""Whom each device listens to, early and late (figure 5 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot

from device_sdk.methods.attention.mixer import AttentionScores

Moment = Mapping[str, AttentionScores]


def weights_between(
    moment: Moment, devices: Mapping[str, str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Layer 1's weights between devices [n, n], and layer 2's share of the mixture [n].

    Means over the parameter groups, NaN where a device has none. ``devices``: name to sender.
    """
    place = {sender: index for index, sender in enumerate(devices.values())}
    first = np.full((len(devices), len(devices)), np.nan)
    second = np.full(len(devices), np.nan)
    for row, name in enumerate(devices):
        scores = moment.get(name)
        if scores is None:
            continue
        first[row] = 0.0
        for sender, weight in zip(scores.neighbours, scores.first.mean(axis=0), strict=True):
            if sender in place:
                first[row, place[sender]] = weight
        second[row] = scores.second[:, 0].mean()
    return first, second


def draw_attention(
    path: Path, moments: Sequence[Moment], devices: Mapping[str, str], groups: Mapping[str, str]
) -> Path:
    """Write a PNG and return its path.

    Args:
        moments: scores by device, the earliest first.
        devices: name to sender.
        groups: name to group; devices of one are drawn side by side, with a line around them.
    """
    order = {name: devices[name] for name in sorted(devices, key=lambda name: groups[name])}
    names = list(order)
    drawn = [weights_between(moment, order) for moment in moments]
    most = max((np.nanmax(first) for first, _ in drawn if not np.isnan(first).all()), default=1.0)
    figure, axes = pyplot.subplots(
        1, 2 * len(drawn), figsize=(7 * len(drawn), 5), width_ratios=(6, 1) * len(drawn)
    )
    bounds = [
        place for place in range(1, len(names)) if groups[names[place]] != groups[names[place - 1]]
    ]
    for index, ((first, second), moment) in enumerate(zip(drawn, moments, strict=True)):
        left, right = axes[2 * index], axes[2 * index + 1]
        rounds = sorted({scores.round_id for scores in moment.values()})
        when = f"round {rounds[0]}" if rounds else "never"
        left.imshow(first, vmin=0, vmax=most, cmap="viridis")
        left.set_title(f"{when}: layer 1, neighbours")
        left.set_xticks(range(len(names)), names, rotation=90)
        left.set_yticks(range(len(names)), names)
        shares = np.stack([second, 1 - second], axis=1)
        right.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        right.set_title("layer 2")
        right.set_xticks(range(2), ["mixture", "global"], rotation=90)
        right.set_yticks([])
        for place in bounds:
            left.axhline(place - 0.5, color="white", linewidth=1)
            left.axvline(place - 0.5, color="white", linewidth=1)
            right.axhline(place - 0.5, color="white", linewidth=1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
