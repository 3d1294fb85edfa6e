"""The README's programs run as printed, one after the other, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Hides what a device does not install.
_AS_ON_A_DEVICE = """
import sys
sys.modules.update(dict.fromkeys(("torch", "onnx", "export"), None))
"""


def program(name: str) -> str:
    """The Python block that follows `<!-- run: name -->`."""
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no program marked `run: {name}`"
    return found[1]


def run(source: str, folder: Path, home: Path) -> str:
    """Run a program in a folder and return what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_embed_example_exports_then_trains_without_torch(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    run(program("desk"), folder, home)
    assert {path.name for path in (folder / "artifacts" / "clicks").iterdir()} == {
        "train.onnx",
        "infer.onnx",
        "initial.safetensors",
        "manifest.json",
    }
    printed = run(_AS_ON_A_DEVICE + program("device"), folder, home)
    loss = re.search(r"loss after 100 steps: (\d+\.\d+)", printed)
    assert loss is not None
    assert 0.3 < float(loss[1]) < 1.5  # coin flips: about log 2
    assert {path.name for path in folder.iterdir()} == {"artifacts", "clicks.state"}
    assert list(home.iterdir()) == []


def test_the_page_about_devices_embeds_one_in_the_same_lines() -> None:
    found = re.search(
        r"```python\n(from device_sdk import AlreadyEnrolled.*?)```", README, re.DOTALL
    )
    assert found
    assert found[1] in (ROOT / "docs" / "device.md").read_text(encoding="utf-8")
    assert len(found[1].splitlines()) <= 20
    compile(found[1], "README.md", "exec")
