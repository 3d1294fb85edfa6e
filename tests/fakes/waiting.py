"""How tests wait: for a condition, and so long that no busy machine makes them wait in vain."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""A test that passes never waits for so long, one that fails does so once."""


def wait_until(
    true: Callable[[], object],
    what: object = "it did not come true",
    *,
    every_seconds: float = 0.02,
) -> None:
    """``what``: told in vain; where it is callable, what it returns then."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < until, what() if callable(what) else what
        time.sleep(every_seconds)
