"""Means and how sure they are: intervals of 95 %, of values and of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Student's t, two-sided 95 %, by degrees of freedom from 1.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_Z95 = 1.959964


def t95(degrees: int) -> float:
    """Student's t, two-sided 95 %, for one degree of freedom or more; above 20 by its expansion in
    1 / degrees (Abramowitz and Stegun 1964, 26.7.5), right to 1e-4."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation (NaN for a single value)."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and half the width of its 95 % interval (NaN for a single value)."""

    mean: float
    half_width: float


def spread(values: Sequence[float]) -> Spread:
    """Over at least one value."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Spread(float(np.mean(values)), deviation)


def interval(values: Sequence[float]) -> Interval:
    """Over at least one value, by Student's t."""
    found = spread(values)
    degrees = len(values) - 1
    if degrees == 0:
        return Interval(found.mean, math.nan)
    return Interval(found.mean, t95(degrees) * found.deviation / math.sqrt(degrees + 1))


def trimmed_interval(values: Sequence[float], cut: int) -> Interval:
    """Over all but the ``cut`` lowest and highest values, of which at least one is left: the mean
    of those, with Tukey and McLaughlin's interval (1963), whose width goes by the values with the
    cut ones at the nearest that is left."""
    ordered = np.sort(values)
    left = ordered[cut : len(ordered) - cut]
    if len(left) < 2:
        return Interval(float(left.mean()), math.nan)
    held = np.clip(ordered, left[0], left[-1])
    degrees = len(left) - 1
    deviation = math.sqrt(float(((held - held.mean()) ** 2).sum()) / (len(left) * degrees))
    return Interval(float(left.mean()), t95(degrees) * deviation)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """``values`` minus ``baseline``, one by one.

    Raises ValueError when the two differ in length.
    """
    return interval([value - base for value, base in zip(values, baseline, strict=True)])
