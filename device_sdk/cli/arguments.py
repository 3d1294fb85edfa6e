"""What the subcommands share: arguments, errors and progress."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TextIO

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


# Types of command line arguments; argparse reports what they refuse.


def positive_int(text: str) -> int:
    """An integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return value


def natural(text: str) -> int:
    """An integer of 0 or more."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not (math.isfinite(value) and value > 0.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return value


def not_negative_float(text: str) -> float:
    """A finite number of 0 or more."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 0.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of 0 or more")
    return value


def slowdown(text: str) -> float:
    """A finite factor of 1 or more."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 1.0):
        raise argparse.ArgumentTypeError(f"{text!r} is no factor of 1 or more")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    value = _number(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 0 <= x < 1 (0.2 is 20 %)")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
