"""The documentation as a site: every page, link and anchor, and the API from the docstrings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import device_sdk
import export

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_and_shows_every_public_name(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for package in (device_sdk, export):
        for name in set(package.__all__) - {"__version__"}:
            public = getattr(package, name)
            module = isinstance(public, ModuleType)
            shown = public.__name__ if module else f"{package.__name__}.{name}"
            assert f'id="{shown}' in api, f"docs/api.md does not show {name}"
