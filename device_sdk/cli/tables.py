"""A file of interactions that a command was given."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from device_sdk.cli.arguments import CommandError, ProgressLine
from device_sdk.interactions import Interactions, InteractionsError, read_interactions
from device_sdk.system.clock import MonotonicClock
from device_sdk.tables.options import reading_of, shown_progress


def read_file(arguments: argparse.Namespace, option: str) -> Interactions:
    """The file's interactions; prints what was understood of it. Raises CommandError."""
    path: Path = getattr(arguments, option.lstrip("-"))
    line = ProgressLine(sys.stderr)
    progress = shown_progress(path.name, line.show, MonotonicClock().now)
    try:
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
