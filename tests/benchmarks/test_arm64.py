"""Train steps beside another machine's, which here is another process of this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.arm64 import __main__ as command
from benchmarks.arm64 import emulated, steps
from benchmarks.harness import StoredRuns
from device_sdk.capability.rungs import first_step
from device_sdk.factorisation import packaged_artifact
from tests.fakes.waiting import PATIENCE_SECONDS


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """The factorisation with a batch, and the state that another process comes to."""
    folder = tmp_path / "all" / "mf"
    shutil.copytree(packaged_artifact(), folder)
    batch = first_step(steps.opened(folder), 8, np.random.default_rng(0))
    np.savez(steps.batch_of(folder), allow_pickle=False, **batch)
    program = [sys.executable, steps.__file__, str(folder.parent)]
    subprocess.run(program, check=True, timeout=PATIENCE_SECONDS)
    return folder


def test_the_same_machine_comes_to_the_same_bits(artifact: Path) -> None:
    outcome = command._compared(artifact)
    assert (outcome.apart, outcome.holds) == (0.0, True)
    assert command._cell(outcome) == "same bits"


def test_what_is_more_than_rounding_is_told(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = steps.opened(artifact)
    other.restore(steps.state_of(artifact))
    name, array = next((n, a) for n, a in other.state.items() if a.dtype == np.float32)
    other.set_state({name: array * np.float32(1.1)})
    other.save(steps.state_of(artifact))
    outcome = command._compared(artifact)
    assert not outcome.holds
    stored = StoredRuns[command.Row, command.Outcome](tmp_path, "arm64", command.Outcome)
    stored.save(command.Row("trixie", "cortex-a72", "shipped:mf"), outcome)
    told = ["--results", str(tmp_path), "--table-only", "--suite"]
    assert command.main([*told, "trixie"]) == 1
    assert "more than rounding | - " in " ".join(capsys.readouterr().out.split())
    assert command.main([*told, "bookworm"]) == 0


def test_what_is_missing_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "_PATH", str(tmp_path))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main([]) == 2
    assert "install apt, dpkg, util-linux first" in capsys.readouterr().err


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.gpg"
    monkeypatch.setattr(emulated, "_KEYS", str(keys))
    into = tmp_path / "root"
    with pytest.raises(emulated.CannotEmulate, match="install debian-archive-keyring"):
        emulated._unpack(into, "trixie", "arm64", ["python3"], "file:///nothing")
    keys.touch()
    if shutil.which("apt-get") is None:
        pytest.skip("there is no apt-get")
    with pytest.raises(emulated.CannotEmulate, match=r"`apt-get \.\.\. update` failed"):
        emulated._unpack(into, "trixie", "arm64", ["python3"], "file:///nothing")
    assert [*tmp_path.iterdir()] == [keys]
