"""What an export is doing, as one line on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]
"""Told of each phase as it begins, and of each step of a long one."""


@contextmanager
def reported(progress: Progress | None) -> Iterator[Progress]:
    """``progress``; where it is None, a line on standard error, if that is a terminal.

    The line is rewritten with each phase and taken away at the end, so that a quick export leaves
    nothing.
    """
    live = progress is None and sys.stderr.isatty()

    def show(text: str) -> None:
        if live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield progress or show
    finally:
        show("")
