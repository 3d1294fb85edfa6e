"""Groups of devices with similar models, no larger than a device can download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans, MeanShift, estimate_bandwidth
from threadpoolctl import threadpool_limits

from device_sdk.fields import Declared, Within

Labels = NDArray[np.int64]
Points = NDArray[np.float64]
Algorithm = Literal["k-means", "mean-shift"]

# More clusters than this times the fewest possible: then members are spread evenly instead.
_MOST_TIMES = 2
# With scikit-learn's usual 0.3 a fleet of six groups would become one.
_NEAREST = 0.2


@dataclass(frozen=True, slots=True)
class ClusterSettings(Declared):
    """How devices are put into clusters (papers/fedamn, section 3.1, the server's function 2).

    Attributes:
        algorithm: ``k-means`` makes as few clusters as the byte cap allows, one where it can;
            ``mean-shift`` finds their number by itself and splits what exceeds the cap.
        most_bytes: of what one device may have to download a round; 0 for no cap.
        hysteresis: clusters stay as they are unless new ones would lower the squared distances to
            the centres by more than this share.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    algorithm: Algorithm = "k-means"
    most_bytes: Annotated[int, Within(0)] = 0
    hysteresis: Annotated[float, Within(0)] = 0.2


def assign_clusters(
    points: Points, previous: Labels, most_members: int, settings: ClusterSettings
) -> Labels:
    """A cluster for each point, int64 [n], numbered from 0 without gaps.

    Args:
        points: float64 [n, d].
        previous: last round's clusters, int64 [n], -1 for points that are new.
        most_members: no cluster is larger.
        settings: of the task.

    The same arguments give the same clusters. Numbers follow the previous ones where members do.
    Raises ValueError where ``most_members`` is below 1 or lengths differ.
    """
    if most_members < 1:
        raise ValueError(f"a cluster of at most {most_members} members cannot hold a device")
    if points.ndim != 2 or previous.shape != (len(points),):
        raise ValueError(f"{len(previous)} previous clusters for points {points.shape}")
    if len(points) == 0:
        return np.empty(0, dtype=np.int64)
    if settings.algorithm == "k-means" and len(points) <= most_members:
        return np.zeros(len(points), dtype=np.int64)
    stay = _stay(points, previous, most_members)
    # One thread: the order of sums, and so the last bits, depend on their number.
    with threadpool_limits(1):
        fresh = _fresh(points, stay, most_members, settings)
    if stay is not None and _spread(points, stay) <= (1 + settings.hysteresis) * _spread(
        points, fresh
    ):
        return _numbered(stay, previous)
    return _numbered(fresh, previous)


def _fresh(
    points: Points, stay: Labels | None, most_members: int, settings: ClusterSettings
) -> Labels:
    if settings.algorithm == "mean-shift":
        return _mean_shift(points, most_members)
    least = -(-len(points) // most_members)
    for count in range(least, min(_MOST_TIMES * least, len(points)) + 1):
        labels = _k_means(points, count, stay)
        if np.bincount(labels).max() <= most_members:
            return labels
    return _even(points, _centres(points, labels), most_members)


def _k_means(points: Points, count: int, stay: Labels | None) -> Labels:
    """From the previous centres where their number fits, else from many random starts."""
    count = min(count, len(np.unique(points, axis=0)))
    warm = stay is not None and stay.max() + 1 == count
    start = _centres(points, stay) if warm and stay is not None else "k-means++"
    found = KMeans(count, init=start, n_init=1 if warm else 10, random_state=0).fit(points)
    return _dense(found.labels_.astype(np.int64))


def _mean_shift(points: Points, most_members: int) -> Labels:
    # The nearest points tell how wide a group is, and a kernel of twice that holds a whole one.
    width = 2 * float(estimate_bandwidth(points, quantile=_NEAREST))
    if width <= 0:
        labels = np.zeros(len(points), dtype=np.int64)
    else:
        labels = _dense(MeanShift(bandwidth=width).fit(points).labels_.astype(np.int64))
    found = labels.copy()
    for label in range(labels.max() + 1):
        rows = np.flatnonzero(labels == label)
        if len(rows) > most_members:
            count = -(-len(rows) // most_members)
            parts = _k_means(points[rows], count, None)
            even = _even(points[rows], _centres(points[rows], parts), most_members)
            found[rows] = np.where(even == 0, label, found.max() + even)
    return _dense(found)


def _stay(points: Points, previous: Labels, most_members: int) -> Labels | None:
    """The previous clusters, new points with the nearest that has room; None where none is left."""
    known = previous >= 0
    if not known.any():
        return None
    labels = np.where(known, _renumbered(previous), -1)
    sizes = np.bincount(labels[known])
    if sizes.max() > most_members:
        return None
    centres = _centres(points[known], labels[known])
    for row in np.flatnonzero(~known):
        far = _squared(points[row][None], centres)[0]
        far[sizes >= most_members] = np.inf
        if not np.isfinite(far).any():
            return None
        labels[row] = int(far.argmin())
        sizes[labels[row]] += 1
    return labels


def _even(points: Points, centres: Points, most_members: int) -> Labels:
    """The assignment to centres of least cost under which none has too many members."""
    # Of identical points k-means makes fewer centres than it was asked for.
    centres = np.resize(
        centres, (max(len(centres), -(-len(points) // most_members)), centres.shape[1])
    )
    cost = np.repeat(_squared(points, centres), most_members, axis=1)
    rows, slots = linear_sum_assignment(cost)
    labels = np.empty(len(points), dtype=np.int64)
    labels[rows] = slots // most_members
    return _dense(labels)


def _numbered(labels: Labels, previous: Labels) -> Labels:
    """Numbers so that as many members as possible keep their cluster's number."""
    known = previous >= 0
    if not known.any():
        return labels
    before = _renumbered(previous)
    size = int(max(labels.max(), before[known].max())) + 1
    shared = np.zeros((size, size))
    np.add.at(shared, (labels[known], before[known]), 1)
    new, old = linear_sum_assignment(-shared)
    number = np.empty(size, dtype=np.int64)
    number[new] = old
    return _dense(number[labels])


def _renumbered(previous: Labels) -> Labels:
    """Without gaps; -1 stays."""
    found = np.full(len(previous), -1, dtype=np.int64)
    known = previous >= 0
    found[known] = _dense(previous[known])
    return found


def _dense(labels: Labels) -> Labels:
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _centres(points: Points, labels: Labels) -> Points:
    return np.stack([points[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def _squared(points: Points, centres: Points) -> Points:
    gaps = points[:, None, :] - centres[None]
    found: Points = (gaps * gaps).sum(axis=2)
    return found


def _spread(points: Points, labels: Labels) -> float:
    return float(((points - _centres(points, labels)[labels]) ** 2).sum())
