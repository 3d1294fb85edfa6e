"""What `make soak` would call growth."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.faults.growth import Reading, grown, memory_per_hour, read_process, too_short

WARM_UP = 300.0
HALF_HOUR = np.arange(0.0, 1800.0, 5.0)


def _readings(
    resident_mb: np.ndarray,  # type: ignore[type-arg]
    files: tuple[int, int] = (10, 10),
    threads: tuple[int, int] = (3, 3),
) -> list[Reading]:
    """One process over half an hour; files and threads change in the middle."""
    late = HALF_HOUR > 1000.0
    return [
        Reading("p", float(second), float(mb), files[int(is_late)], threads[int(is_late)])
        for second, mb, is_late in zip(HALF_HOUR, resident_mb, late, strict=True)
    ]


def _noise(seed: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0.0, 1.0, len(HALF_HOUR))


@pytest.mark.parametrize("seed", range(10))
def test_flat_and_noisy_is_no_growth(seed: int) -> None:
    assert grown(_readings(100.0 + _noise(seed)), WARM_UP) == []


def test_caches_that_fill_in_the_warm_up_are_no_growth() -> None:
    assert grown(_readings(70.0 + 30.0 * (1 - np.exp(-HALF_HOUR / 60))), WARM_UP) == []


def test_a_peak_and_one_step_of_the_allocator_are_no_growth() -> None:
    resident = np.full(len(HALF_HOUR), 100.0)
    resident[100:110] += 40.0
    resident[200:] += 1.5
    assert grown(_readings(resident), WARM_UP) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_of_memory_is_growth(seed: int) -> None:
    readings = _readings(100.0 + 8.0 * HALF_HOUR / 3600 + _noise(seed))
    assert memory_per_hour(readings) == pytest.approx(8.0, abs=1.0)
    assert "MB an hour" in grown(readings, WARM_UP)[0]


def test_open_files_and_threads_that_rise_are_growth() -> None:
    flat = np.full(len(HALF_HOUR), 100.0)
    assert grown(_readings(flat, files=(10, 12)), WARM_UP) == []
    assert grown(_readings(flat, files=(10, 13)), WARM_UP) == ["p: files went from 10 to 13"]
    assert grown(_readings(flat, threads=(3, 4)), WARM_UP) == ["p: threads went from 3 to 4"]


def test_memory_is_not_judged_by_a_few_minutes() -> None:
    leaking = _readings(100.0 + HALF_HOUR)
    short = [reading for reading in leaking if reading.seconds < 600.0]
    assert too_short(short, WARM_UP) and grown(short, WARM_UP) == []
    assert not too_short(leaking, WARM_UP) and grown(leaking, WARM_UP)


def test_a_process_is_read() -> None:
    mine = read_process("me", os.getpid(), 1.0)
    assert mine.resident_mb > 5 and mine.files > 2 and mine.threads >= 1
