"""A file of interactions that a command was given."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device_sdk.cli.arguments import CommandError, ProgressLine
from device_sdk.interactions import Interactions, InteractionsError, read_interactions
from device_sdk.system.clock import MonotonicClock
from device_sdk.tables.options import reading_of, shown_progress


def read_file(
    arguments: argparse.Namespace, option: str, *, quiet_seconds: float = 2.0
) -> Interactions:
    """The file's interactions; prints what was understood of it. Raises CommandError.

    ``quiet_seconds``: after which it says that a pipe is waited for.
    """
    path: Path = getattr(arguments, option.lstrip("-"))
    line = ProgressLine(sys.stderr)
    progress = shown_progress(path.name, line.show, MonotonicClock().now)
    try:
        with _told_of_a_pipe(path, quiet_seconds):
            found = read_interactions(path, reading_of(arguments), progress)
    except InteractionsError as error:
        raise CommandError(f"{option}: {error}") from None
    except OSError as error:
        why = error.strerror or error
        raise CommandError(f"{option}: {path} cannot be read: {why}") from None
    finally:
        line.clear()
    print("\n  ".join(found.understood), flush=True)
    return found


@contextmanager
def _told_of_a_pipe(path: Path, quiet_seconds: float) -> Iterator[None]:
    """A pipe that nobody writes into is waited for as long as that lasts."""
    if not path.is_fifo():
        yield
        return
    said = f"{path} is a pipe: waiting until a program has written into it, and closed it ..."
    timer = threading.Timer(quiet_seconds, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
