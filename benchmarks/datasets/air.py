"""Beijing air quality: 48-hour windows of twelve stations, and the PM2.5 class that follows.

The UCI set "Beijing Multi-Site Air Quality" (Zhang et al. 2017), hourly from March 2013 to
February 2017. The set of papers/fedamn (42 stations in four cities) is not available; these are
the stations of one city, so they differ less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device_sdk.tables.text import open_table

HOURS = 48
"""Length of a window."""
STRIDE_HOURS = 6
"""From one window's start to the next one's."""
BOUNDS = (35.0, 75.0, 115.0, 150.0)
"""Upper limits of the PM2.5 levels 1 to 4 in ug/m3 (HJ 633-2012; its levels 5 and 6 are one)."""
CLASSES = len(BOUNDS) + 1
SUBURBS = frozenset({"Changping", "Dingling", "Huairou", "Shunyi"})
"""The stations far outside of the city."""

_NUMBERS = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM")
FEATURES = (*_NUMBERS, "wind_north", "wind_east", "hour_sin", "hour_cos")
"""Names of a window's columns; the last two are the clock's, which no station can lack."""
MEASURED = FEATURES[:-2]
"""The columns that a station may lack."""

_SKEWED = ("PM2.5", "PM10", "SO2", "NO2", "CO", "RAIN")
_COMPASS = ("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE")
_COMPASS = (*_COMPASS, "S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW")
_YEAR_HOURS = 365 * 24
# A gap is bridged by the last value for so long; after that the value is unknown, and zero.
_CARRIED_HOURS = 6
_LEAST_KNOWN = 0.75

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class AirPart:
    """Windows ``x`` float32 [n, 48, features] and classes ``y`` int64 [n], in order of time.

    ``last_level`` int64 [n]: the class of the last PM2.5 measured in the window.
    """

    x: Floats
    y: NDArray[np.int64]
    last_level: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class AirStation:
    """One station: two years to train on, the third to choose by, the fourth to test with."""

    name: str
    train: AirPart
    validation: AirPart
    test: AirPart


def load_air(root: Path, *, ahead_hours: int = 3) -> list[AirStation]:
    """The stations in order of their names.

    A window's class is that of the PM2.5 measured ``ahead_hours`` after its last hour. Whole years
    are told apart, so that train, validation and test have the same seasons, and no window
    reaches into another part.

    What is missing: a value is carried forward for at most six hours, never back (that would be
    the future); after that it is zero, the training mean. Windows whose class was not measured, or
    that lack PM2.5 for more than a quarter of their hours, are left out. Means and deviations are
    the station's own, over its training years.

    ``root`` is the folder that holds ``beijing-air``; raises FileNotFoundError where it is missing,
    ValueError for an hour count below 1.
    """
    if ahead_hours < 1:
        raise ValueError(f"ahead_hours is {ahead_hours}; expected at least 1")
    files = sorted((root / "beijing-air").glob("PRSA_Data_*.csv.gz"))
    if not files:
        raise FileNotFoundError(f"no PRSA_Data_*.csv.gz in {root / 'beijing-air'}")
    return [_station(file, ahead_hours) for file in files]


def without_features(
    stations: list[AirStation], count: int, rng: np.random.Generator
) -> list[AirStation]:
    """Each station lacks ``count`` measured columns of its own, drawn at random (zero throughout).

    PM2.5 itself may be among them: its classes are then to be told from the rest.
    """
    found = []
    for station in stations:
        lost = rng.choice(len(MEASURED), size=count, replace=False)
        parts = []
        for part in (station.train, station.validation, station.test):
            x = part.x.copy()
            x[:, :, lost] = 0.0
            parts.append(AirPart(x, part.y, part.last_level))
        found.append(AirStation(station.name, *parts))
    return found


def _station(file: Path, ahead: int) -> AirStation:
    rows = open_table(file).rows()
    table = dict(zip(next(rows), zip(*rows, strict=True), strict=True))
    values = np.stack([_numbers(table[name]) for name in _NUMBERS], axis=1)
    particles = values[:, 0].copy()
    for index, name in enumerate(_NUMBERS):
        if name in _SKEWED:
            values[:, index] = np.log1p(values[:, index])
    values = np.concatenate([values, _wind(table["wd"])], axis=1)
    years = len(values) // _YEAR_HOURS
    bounds = [0, (years - 2) * _YEAR_HOURS, (years - 1) * _YEAR_HOURS, len(values)]
    early = values[: bounds[1]]
    mean, deviation = np.nanmean(early, axis=0), np.nanstd(early, axis=0)
    scaled = (_carried(values) - mean) / np.where(deviation > 0, deviation, 1.0)
    hour = np.asarray([int(hour) for hour in table["hour"]]) * (2 * np.pi / 24)
    clock = np.stack([np.sin(hour), np.cos(hour)], axis=1)
    filled = np.concatenate([np.nan_to_num(scaled, nan=0.0), clock], axis=1).astype(np.float32)
    parts = [
        _windows(filled[start:end], particles[start:end], ahead)
        for start, end in itertools.pairwise(bounds)
    ]
    return AirStation(table["station"][0], *parts)


def _numbers(column: Sequence[str]) -> NDArray[np.float64]:
    return np.asarray([np.nan if text == "NA" else float(text) for text in column])


def _wind(column: Sequence[str]) -> NDArray[np.float64]:
    angles = {name: turn * 2 * np.pi / len(_COMPASS) for turn, name in enumerate(_COMPASS)}
    turns = np.asarray([angles.get(name, np.nan) for name in column])
    return np.stack([np.cos(turns), np.sin(turns)], axis=1)


def _carried(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each gap's first hours take the last value before it."""
    hours = np.arange(len(values))[:, None]
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, hours), axis=0)
    near = (last >= 0) & (hours - last <= _CARRIED_HOURS)
    carried = np.take_along_axis(values, np.maximum(last, 0), axis=0)
    return np.where(near, carried, np.nan)


def _windows(filled: Floats, particles: NDArray[np.float64], ahead: int) -> AirPart:
    starts = np.arange(0, len(filled) - HOURS - ahead + 1, STRIDE_HOURS)
    after = particles[starts + HOURS - 1 + ahead]
    spans = starts[:, None] + np.arange(HOURS)
    known = (~np.isnan(particles))[spans].mean(axis=1)
    kept = ~np.isnan(after) & (known >= _LEAST_KNOWN)
    return AirPart(
        np.ascontiguousarray(filled[spans[kept]]),
        _levels(after[kept]),
        _levels(_last_known(particles[spans[kept]])),
    )


def _last_known(windows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The last number of each row that is not NaN, [n]."""
    last = windows.shape[1] - 1 - (~np.isnan(windows))[:, ::-1].argmax(axis=1)
    return windows[np.arange(len(windows)), last]


def _levels(particles: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.digitize(particles, BOUNDS, right=True).astype(np.int64)
