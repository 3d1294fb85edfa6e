"""The version of the installed distribution, looked up when it is asked for."""

from __future__ import annotations

import importlib.metadata

try:
    __version__ = importlib.metadata.version("tessera-edge")
except importlib.metadata.PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
