"""What the tests of training share: a device's home, and two artifacts to choose among."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.home.home import Home
from device_sdk.train.job import LocalArtifact
from tests.fakes.handmade import linear_artifact, linear_parts, write_artifact
from tests.fakes.jobs import artifact_in


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home", create=True)
    yield opened
    opened.close()


@pytest.fixture
def artifacts(tmp_path: Path) -> tuple[LocalArtifact, ...]:
    """Two that differ in their name alone."""
    linear_artifact(tmp_path / "small")
    manifest, files = linear_parts()
    write_artifact(tmp_path / "large", replace(manifest, name="large"), files)
    return tuple(artifact_in(tmp_path / name) for name in ("small", "large"))
