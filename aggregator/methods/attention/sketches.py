"""Sketches of the devices' models: what tells, before any vector is fetched, who is like whom."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.sketch import sketches
from device_sdk.wire.arrays.tensors import LARGEST_OF_EVERY_CODEC

__all__ = ["cluster_points", "gap_sketches", "in_cluster_units"]

Floats = NDArray[np.float32]
_TINY = np.float32(1e-12)
# What every codec carries: only sketches of absurd models are longer.
_LARGEST = np.float32(LARGEST_OF_EVERY_CODEC)


def gap_sketches(
    vectors: Floats,
    shared: Floats,
    places: NDArray[Any],
    layout: FlatLayout,
    training: AttentionTraining,
) -> Floats:
    """P (w_j - w_g), float32 [n, g, d], over the block that all widths have.

    ``vectors`` [n, p] and ``shared`` [p] in the widest layout; ``layout`` is the narrowest, and
    ``places`` its parameters' places among the p.
    """
    gaps = vectors[:, places] - shared[places]
    return sketches(gaps, layout, training.sketch_seed, training.sketch_rows)


def in_cluster_units(raw: Floats, clusters: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The sketches [n, g, d] in units of their cluster's RMS length, and that length [clusters, g].

    ``clusters``: of each of the n, from 0 without gaps.
    """
    count = int(clusters.max()) + 1 if len(clusters) else 0
    scales = np.ones((count, raw.shape[1]), dtype=np.float32)
    for cluster in range(count):
        squared = (raw[clusters == cluster] ** 2).sum(axis=2)
        scales[cluster] = np.minimum(np.sqrt(squared.mean(axis=0)), _LARGEST)
    scaled = raw / np.maximum(scales, _TINY)[clusters][:, :, None]
    return np.clip(scaled, -_LARGEST, _LARGEST).astype(np.float32), scales


def cluster_points(raw: Floats) -> NDArray[np.float64]:
    """Points to cluster by, [n, g * d]: each group counts the same, whatever its size."""
    wide = raw.astype(np.float64)
    lengths = np.sqrt((wide**2).sum(axis=2).mean(axis=0))
    points: NDArray[np.float64] = wide / np.maximum(lengths, 1e-12)[None, :, None]
    return points.reshape(len(wide), -1)
