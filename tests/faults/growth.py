"""What a long run calls growth: of a process's memory, open files and threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil

_MOST_GROWTH = 0.05  # of resident memory in an hour
_MOST_GROWTH_MB = 3.0  # what is below this in an hour is noise
_JUDGED_SECONDS = 600.0
_MOST_FILES, _MOST_THREADS = 2.0, 0.0


@dataclass(frozen=True)
class Reading:
    """One process at one time. ``resident_mb``: 10^6 bytes."""

    process: str
    seconds: float
    resident_mb: float
    files: int
    threads: int


def read_process(name: str, pid: int, seconds: float) -> Reading:
    """What the kernel says about a process."""
    process = psutil.Process(pid)
    with process.oneshot():
        resident = process.memory_info().rss / 1e6
        return Reading(name, seconds, resident, process.num_fds(), process.num_threads())


def memory_per_hour(readings: list[Reading]) -> float:
    """MB that one process's memory rises in an hour.

    The median slope of all pairs (Theil and Sen): a peak, or one step of the allocator, does not
    make a trend, and a leak at each round does.
    """
    if len(readings) < 2:
        return 0.0
    mb = np.array([r.resident_mb for r in readings])
    seconds = np.array([r.seconds for r in readings])
    early, late = np.triu_indices(len(readings), 1)
    return float(np.median((mb[late] - mb[early]) / (seconds[late] - seconds[early]))) * 3600


def too_short(readings: list[Reading], warm_up_seconds: float) -> bool:
    """Whether less than ten minutes lie behind the warm-up; memory is not judged then."""
    last = max((reading.seconds for reading in readings), default=0.0)
    return last - warm_up_seconds < _JUDGED_SECONDS


def grown(readings: list[Reading], warm_up_seconds: float) -> list[str]:
    """What is not flat behind the warm-up, for people.

    Memory: a slope above 5 % and 3 MB an hour. Files and threads: the medians of the first and the
    last fifth, which may differ by two files and by no thread.
    """
    found = []
    judged = not too_short(readings, warm_up_seconds)
    for name in dict.fromkeys(reading.process for reading in readings):
        mine = [r for r in readings if r.process == name and r.seconds >= warm_up_seconds]
        slope = memory_per_hour(mine)
        allowed = max(
            _MOST_GROWTH_MB, _MOST_GROWTH * float(np.median([r.resident_mb for r in mine]))
        )
        if judged and slope > allowed:
            found.append(f"{name}: {slope:+.1f} MB an hour, more than {allowed:.1f}")
        fifth = max(1, len(mine) // 5)
        for what, most in (("files", _MOST_FILES), ("threads", _MOST_THREADS)):
            first = float(np.median([getattr(r, what) for r in mine[:fifth]]))
            last = float(np.median([getattr(r, what) for r in mine[-fifth:]]))
            if last - first > most:
                found.append(f"{name}: {what} went from {first:,.0f} to {last:,.0f}")
    return found
