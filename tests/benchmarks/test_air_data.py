from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.datasets.air import (
    CLASSES,
    FEATURES,
    HOURS,
    AirStation,
    load_air,
    without_features,
)

COLUMNS = (
    *("No", "year", "month", "day", "hour", "PM2.5", "PM10", "SO2", "NO2", "CO", "O3"),
    *("TEMP", "PRES", "DEWP", "RAIN", "wd", "WSPM", "station"),
)
YEAR = 365 * 24
HOURS_IN_ALL = 3 * YEAR + 24


def write_station(root: Path, name: str, missing: dict[str, slice]) -> np.ndarray:
    """Three years in which PM2.5 is a slow wave; returns it."""
    folder = root / "beijing-air"
    folder.mkdir(exist_ok=True)
    hours = np.arange(HOURS_IN_ALL)
    particles = (100 + 90 * np.sin(hours / 40)).round()
    rng = np.random.default_rng(len(name))
    values = {column: ["1"] * HOURS_IN_ALL for column in COLUMNS}
    for column in (*COLUMNS[6:15], "WSPM"):
        values[column] = [f"{number:.2f}" for number in rng.random(HOURS_IN_ALL)]
    values["hour"] = [str(hour % 24) for hour in hours.tolist()]
    values["PM2.5"] = [str(number) for number in particles.tolist()]
    values["wd"], values["station"] = ["NNE"] * HOURS_IN_ALL, [name] * HOURS_IN_ALL
    for column, span in missing.items():
        values[column][span] = ["NA"] * len(values[column][span])
    path = folder / f"PRSA_Data_{name}_20130301-20170228.csv.gz"
    with gzip.open(path, "wt", compresslevel=1, newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        out.writerows(zip(*values.values(), strict=True))
    return particles


@pytest.fixture(scope="module")
def stations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[AirStation], np.ndarray]:
    root = tmp_path_factory.mktemp("air")
    particles = write_station(root, "Whole", {})
    gaps = {"TEMP": slice(100, 120), "PM2.5": slice(1000, 1100), "wd": slice(0, 5)}
    write_station(root, "Gappy", gaps)
    return load_air(root), particles


def test_windows_and_classes(stations: tuple[list[AirStation], np.ndarray]) -> None:
    whole, particles = stations[0][1], stations[1]
    assert whole.name == "Whole"
    assert whole.train.x.shape[1:] == (HOURS, len(FEATURES))
    assert whole.train.x.dtype == np.float32
    bounds = np.asarray([35, 75, 115, 150])
    for row in (0, 7, 100):
        last = 6 * row + HOURS - 1
        assert whole.train.y[row] == (particles[last + 3] > bounds).sum()
        assert whole.train.last_level[row] == (particles[last] > bounds).sum()
    assert set(whole.train.y) == set(range(CLASSES))


def test_years_are_told_apart(stations: tuple[list[AirStation], np.ndarray]) -> None:
    whole, particles = stations[0][1], stations[1]
    windows = (YEAR - HOURS - 3) // 6 + 1
    assert len(whole.validation.y) == windows
    assert len(whole.train.y) == (YEAR - HOURS - 3) // 6 + 1
    first_of_test = 2 * YEAR + HOURS - 1 + 3
    assert whole.test.y[0] == (particles[first_of_test] > [35, 75, 115, 150]).sum()


def test_the_scale_is_that_of_the_training_years(
    stations: tuple[list[AirStation], np.ndarray],
) -> None:
    whole = stations[0][1]
    numbers = whole.train.x[::8, :, :11]
    np.testing.assert_allclose(numbers.mean(axis=(0, 1)), 0, atol=0.05)
    np.testing.assert_allclose(numbers.std(axis=(0, 1)), 1, atol=0.05)


def test_gaps_are_bridged_forward_for_six_hours_and_never_back(
    stations: tuple[list[AirStation], np.ndarray],
) -> None:
    gappy = stations[0][0]
    temperature = FEATURES.index("TEMP")
    window = gappy.train.x[15, :, temperature]  # from hour 90: the gap is in hours 10 to 29
    assert (window[10:16] == window[9]).all()
    assert (window[16:30] == 0).all()
    assert window[30] != 0
    assert (gappy.train.x[0, :5, FEATURES.index("wind_north")] == 0).all()


def test_windows_without_a_class_or_most_of_their_particles_are_left_out(
    stations: tuple[list[AirStation], np.ndarray],
) -> None:
    gappy, whole = stations[0]
    spoilt = 0
    for start in range(0, YEAR - HOURS - 3 + 1, 6):
        known = sum(not 1000 <= hour < 1100 for hour in range(start, start + HOURS))
        spoilt += known < 36 or 1000 <= start + HOURS - 1 + 3 < 1100
    assert len(whole.train.y) - len(gappy.train.y) == spoilt > 0


def test_each_station_lacks_features_of_its_own(
    stations: tuple[list[AirStation], np.ndarray],
) -> None:
    lacking = without_features(stations[0], 2, np.random.default_rng(0))
    for before, after in zip(stations[0], lacking, strict=True):
        lost = [np.flatnonzero((p.x == 0).all(axis=(0, 1))) for p in (after.train, after.test)]
        already = np.flatnonzero((before.train.x == 0).all(axis=(0, 1)))
        new = np.setdiff1d(lost[0], already)
        assert 0 < len(new) <= 2
        assert max(new) < len(FEATURES) - 2
        np.testing.assert_array_equal(lost[0], lost[1])
