"""Artifacts that came with the installation, by their id."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from device_sdk.artifact import MANIFEST_FILE


def installed_artifacts(*folders: str | os.PathLike[str]) -> Mapping[bytes, Path]:
    """Folder by artifact id, 32 bytes: SHA-256 of ``manifest.json``."""
    return {
        hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).digest(): folder
        for folder in map(Path, folders)
    }
