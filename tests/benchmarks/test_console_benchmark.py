"""What open pages cost, measured small: all of them are live while updates come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.aggregator.broker import MOSQUITTO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]


def test_pages_are_live_while_updates_come(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("argon2")
    from benchmarks.console.__main__ import measure_open_pages

    found = measure_open_pages(12, 3, 20, 2, tmp_path)
    assert len(found.shares) == len(found.work) == 2
    assert min(*found.shares, found.updates_a_second) > 0
    assert found.fragments >= 1  # each page came, once at least
    assert {*found.cores} == {"aggregator", "broker", "console", "fleet"}
