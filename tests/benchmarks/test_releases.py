"""Which releases `make newest` tries the wheel with."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

from benchmarks.releases import EXTRAS, ROOT, lowest, newest


def test_the_lowest_are_those_of_pyproject(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = list(project["dependencies"])
    for extra in EXTRAS.split(","):
        asked += project["optional-dependencies"][extra]
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = [f"Requires-Dist: {each}" for each in asked]
        lines.append('Requires-Dist: mutmut>=3.8 ; extra == "dev"')
        archive.writestr("made.dist-info/METADATA", "\n".join(lines) + "\n\n")
    pins = lowest(wheel)
    assert {"torch==2.13.*", "numpy==2.0.*", "paho-mqtt==2.0.*", "onnxruntime==1.24.*"} <= set(pins)
    assert len(pins) == len(asked)
    assert newest(wheel) == []
