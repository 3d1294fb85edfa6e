"""Child processes of tests."""

from __future__ import annotations

import os
from pathlib import Path

import device_sdk


def child_environment() -> dict[str, str]:
    """The environment for a child process that imports what this process imports."""
    return {**os.environ, "PYTHONPATH": str(Path(device_sdk.__file__).parents[1])}
