"""How a long run shows where it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_line(label: str) -> Iterator[Callable[[str], None]]:
    """One line on standard error, rewritten on a terminal; elsewhere a line at the end."""
    live = sys.stderr.isatty()
    last = ""

    def show(text: str) -> None:
        nonlocal last
        last = text
        if live:
            print(f"\r\033[K{label}: {text}", end="", file=sys.stderr, flush=True)

    yield show
    print(f"\r\033[K{label}: {last}" if live else f"{label}: {last}", file=sys.stderr, flush=True)
