"""The wheel alone is enough for a device: a fresh environment, no torch, nothing written astray."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device_install import DeviceInstall, IndexUnreachable, install_device
from benchmarks.install_size import SIZE_BUDGET_MB
from tests.fakes.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Person:
    """Somebody at a device: a home, a folder for temporary files, and one to work in."""

    home: Path
    temporary: Path
    work: Path

    def run(self, command: Sequence[str | Path]) -> str:
        """Run a command with next to nothing in its environment; what it printed."""
        environment = {
            "PATH": os.defpath,
            "HOME": str(self.home),
            "USERPROFILE": str(self.home),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def left_behind(self) -> list[Path]:
        """What lies in the home and in the folder for temporary files."""
        return [*self.home.rglob("*"), *self.temporary.rglob("*")]


@pytest.fixture(scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> DeviceInstall:
    """The wheel with the device's dependencies, nothing more."""
    try:
        return install_device(wheel, tmp_path_factory.mktemp("device") / "venv")
    except IndexUnreachable as error:
        pytest.skip(f"no package index can be reached: {str(error)[-300:]}")


@pytest.fixture
def person(tmp_path: Path) -> Person:
    """A new person with empty folders."""
    someone = Person(tmp_path / "home", tmp_path / "temporary", tmp_path / "work")
    for folder in (someone.home, someone.temporary, someone.work):
        folder.mkdir()
    return someone


def test_nothing_heavy_is_installed(install: DeviceInstall) -> None:
    installed = {name.lower() for name in install.packages()}
    assert "tessera-edge" in {name.replace("_", "-") for name in installed}
    assert not installed & {"torch", "onnx", "sympy", "rich", "amqtt", "matplotlib", "pytest"}


def test_the_install_stays_within_its_size_and_is_of_the_size_that_is_told(
    install: DeviceInstall,
) -> None:
    measured_mb = install.size_bytes() / 1e6
    assert measured_mb <= SIZE_BUDGET_MB
    for page, words in (
        ("README.md", r"the device install, and torch's \| (\d+) MB"),
        ("docs/figures/training.md", r"The device install is (\d+) MB"),
    ):
        (told,) = re.findall(words, (ROOT / page).read_text(encoding="utf-8"))
        # Newer versions of the dependencies are a little larger or smaller.
        assert float(told) == pytest.approx(measured_mb, rel=0.05), page


def test_bench_picks_a_dimension_and_leaves_no_trace(
    install: DeviceInstall, person: Person
) -> None:
    task = ["--deadline", "0.5", "--items", "300", "--interactions", "100", "--max-k", "8"]
    program = install.program("tessera-device")
    printed = person.run([program, "bench", *task, "--time-box", "4", "--json"])
    assert int(json.loads(printed)["chosen"]) in range(1, 9)
    assert person.left_behind() == []
    assert list(person.work.iterdir()) == []


def test_train_recommends_what_was_not_seen_and_leaves_no_trace(
    install: DeviceInstall, person: Person
) -> None:
    rng = np.random.default_rng(5)
    seen = {(user, item) for user in range(8) for item in rng.choice(40, size=12, replace=False)}
    lines = [f"user{user},item{item}" for user, item in sorted(seen)]
    (person.work / "views.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--k", "4", "--epochs", "5", "--user", "user3", "--recommend", "6"]
    printed = person.run(
        [
            install.program("tessera-device"),
            "train",
            *("--interactions", "views.csv", "--out", "views.checkpoint", *options),
        ]
    )
    recommended = {word for word in printed.split() if re.fullmatch(r"item\d+", word)}
    known = {f"item{item}" for _, item in seen}
    assert len(recommended) == 6
    assert recommended <= known - {f"item{item}" for user, item in seen if user == 3}
    assert person.left_behind() == []
    assert {path.name for path in person.work.iterdir()} == {"views.csv", "views.checkpoint"}


_EMBEDDED = """
import sys
import numpy as np
import device_sdk
from device_sdk.factorisation import packaged_artifact

trainer = device_sdk.Trainer(packaged_artifact())
before = trainer.parameters
changed = {name: value + 1 for name, value in before.items()}
trainer.set_parameters(changed)
trainer.save("state")
trainer.reset()
trainer.restore("state")
assert all(np.array_equal(trainer.parameters[name], changed[name]) for name in changed)
assert not {"torch", "onnx"} & set(sys.modules)
print(len(changed))
"""


def test_an_app_embeds_the_trainer_and_nothing_else_is_written(
    install: DeviceInstall, person: Person
) -> None:
    assert int(person.run([install.python, "-c", _EMBEDDED])) >= 2
    assert person.left_behind() == []
    assert [path.name for path in person.work.iterdir()] == ["state"]
