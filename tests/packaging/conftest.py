"""The wheel of this checkout, built once for all packaging tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.device_install import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a freshly built tessera_edge-*.whl."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (it comes with the extra dev)")
    return build_wheel(tmp_path_factory.mktemp("wheel"))
