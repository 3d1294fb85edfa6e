"""Importing and training write nothing outside the folders that were given."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.child_environment import child_environment
from tests.fakes.handmade import linear_artifact
from tests.fakes.quick import run_python

PROGRAM = """
import sys
import numpy as np
{imports}
trainer = Trainer(sys.argv[1])
batch = {{"x": np.ones((4, 4), np.float32), "y": np.ones((4, 3), np.float32)}}
for _ in range(3):
    trainer.step(batch)
trainer.predict(batch)
trainer.save(sys.argv[2])
trainer.restore(sys.argv[2])
assert not {{"torch", "onnx", "aggregator", "export"}} & set(sys.modules)
"""


def _run(tmp_path: Path, imports: str) -> None:
    folder, home, work = tmp_path / "artifact", tmp_path / "home", tmp_path / "work"
    linear_artifact(folder)
    home.mkdir()
    work.mkdir()
    before = sorted(path.name for path in folder.iterdir())
    environment = {
        **{k: v for k, v in child_environment().items() if k != "ORT_DISABLE_TELEMETRY"},
        "HOME": str(home),
        "USERPROFILE": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = run_python(
        "-c",
        PROGRAM.format(imports=imports),
        str(folder),
        str(work / "c"),
        env=environment,
        cwd=work,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(home.rglob("*")) == []
    assert [path.name for path in work.iterdir()] == ["c"]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    _run(tmp_path, "from device_sdk import Trainer")


def test_neither_when_a_module_inside_is_imported_first(tmp_path: Path) -> None:
    _run(tmp_path, "import device_sdk.runtime.session\nfrom device_sdk.trainer import Trainer")
