"""Figures over seeds: means, and how far off they may be."""

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


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation (NaN for a single value) over seeds."""

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
    t = _T95[degrees - 1] if degrees <= len(_T95) else 2.086
    return Interval(found.mean, t * found.deviation / math.sqrt(degrees + 1))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """``values`` minus ``baseline``, seed by seed.

    Raises ValueError when the two differ in length.
    """
    return interval([value - base for value, base in zip(values, baseline, strict=True)])
