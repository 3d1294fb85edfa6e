"""What the commands that export a ready-made model share: their options and their errors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from export.errors import ExportError


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option ``-o``, and ``--no-verify``."""
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--no-verify", action="store_true", help="skip the comparison with torch")


def add_seed(parser: argparse.ArgumentParser) -> None:
    """The option ``--seed``."""
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: 0)")


@contextmanager
def settings_explained() -> Iterator[None]:
    """Turns the ValueError of a model or an optimizer that refuses its settings into an
    ExportError, which a command prints."""
    try:
        yield
    except ValueError as error:
        raise ExportError(str(error)) from error
