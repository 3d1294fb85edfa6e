"""What the commands share: their home, errors and progress."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TextIO

from device_sdk.system.printable import PrintableFormatter

# How a command fails.


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what would help."""


# The option that says which device is meant.

DEFAULT_HOME = "~/.tessera"


def add_home(parser: argparse.ArgumentParser) -> None:
    """Add ``--home``."""
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(DEFAULT_HOME),
        metavar="DIR",
        help=f"the device's own folder (default: {DEFAULT_HOME})",
    )


# What the library has to say while a command works.


def log_to_stderr() -> None:
    """Print warnings as lines of their own."""
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[log])


# One line of progress, on terminals only.


class ProgressLine:
    """Rewrites one line of `stream`; silent where that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)

    def clear(self) -> None:
        """Leave an empty line."""
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
