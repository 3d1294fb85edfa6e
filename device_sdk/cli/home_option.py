"""The option that says which device is meant."""

from __future__ import annotations

import argparse
from pathlib import Path

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
