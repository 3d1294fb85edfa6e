"""How tests wait: for a condition, and so long that no busy machine makes them wait in vain."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""A test that passes never waits for so long, one that fails does so once."""
NEVER_SECONDS = 12 * PATIENCE_SECONDS
"""Until the deadline of a round: it ends when all have come, and no busy machine makes one late."""
_DEADLINE = f"deadline_seconds = {NEVER_SECONDS}"


def endless(round_lines: str) -> str:
    """The lines of a task file's ``[round]``, with a deadline that no test reaches, and none that
    closes sooner without everybody.

    Unless they name another: for rounds by a clock that the test holds, and for those few tests
    whose rounds have to end by their deadlines (``tests/test_real_time.py`` lists both).
    """
    if "\ndeadline_seconds" in f"\n{round_lines}":
        return round_lines
    least = "" if "least_deadline_seconds" in round_lines else f"least_{_DEADLINE}"
    return f"{round_lines}\n{_DEADLINE}\n{least}"


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


def fails_in_the_end(
    attempt: Callable[[float], object], error: type[Exception], why: str, seconds: float
) -> None:
    """An attempt with a time limit in seconds fails, and says why.

    It has heard by then what it says; where this machine was too busy, one with twice the time has.
    """
    said = ""
    while not re.search(why, said):
        assert seconds < PATIENCE_SECONDS, said
        try:
            attempt(seconds)
        except error as failed:
            said = str(failed)
        else:
            raise AssertionError("it did not fail")
        seconds *= 2
