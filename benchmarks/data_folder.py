"""Where benchmarks and examples find data sets."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_data_folder() -> Path:
    """The folder that TESSERA_DATA names, else ``../shared/data``; it may be missing."""
    return Path(os.environ.get("TESSERA_DATA") or "../shared/data")


def data_folder(given: Path | None, holds: str) -> Path:
    """``given``, else the default one.

    Ends the program with status 2, saying what the folder must hold, where there is none.
    """
    root = given or default_data_folder()
    if not root.is_dir():
        print(
            f"no data folder {root}: set TESSERA_DATA (or --root) to the folder that holds {holds}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return root
