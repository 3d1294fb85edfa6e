"""What `make soak` would call growth."""

from __future__ import annotations

import os

from tests.faults.soak import Reading, grown, read_process


def _readings(resident: list[float], files: int = 10, last_files: int = 10) -> list[Reading]:
    count = len(resident)
    return [
        Reading("p", float(n), mb, last_files if n > count / 2 else files, 3)
        for n, mb in enumerate(resident)
    ]


def test_flat_and_noisy_is_no_growth() -> None:
    assert grown(_readings([100.0, 101.0, 99.0, 100.5] * 10), 5.0) == []


def test_the_warm_up_is_left_out() -> None:
    assert grown(_readings([10.0] * 5 + [100.0] * 30), 5.0) == []


def test_a_leak_of_memory_or_of_files_is_growth() -> None:
    assert "resident_mb" in grown(_readings([100.0 + n for n in range(40)]), 5.0)[0]
    assert "files" in grown(_readings([100.0] * 40, 10, 20), 5.0)[0]


def test_a_process_is_read() -> None:
    mine = read_process("me", os.getpid(), 1.0)
    assert mine.resident_mb > 5 and mine.files > 2 and mine.threads >= 1
