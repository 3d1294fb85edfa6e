"""A disk without room left, in the middle of commits: not an error that a test made up.

A tmpfs of a few megabytes in a mount namespace of the test's own, where the machine allows that;
and, everywhere, a limit on the size of files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS

_REPOSITORY = Path(__file__).parents[2]
_TRIALS = 8
_NAMESPACE = ["unshare", "--mount", "--map-root-user"]
_MOUNT = 'mount -t tmpfs -o size=12m none "$0" && exec "$@"'


def _run(kind: str, folder: Path, prefix: list[str]) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.attacks.small_disk", kind, str(folder), "7"]
    ended = subprocess.run(
        [*prefix, *program, str(_TRIALS)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS * 2,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def _small_file_system(folder: Path) -> list[str]:
    """What runs a program with a tmpfs at ``folder`` that it alone sees; skips where none may."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed (util-linux)")
    prefix = [*_NAMESPACE, "sh", "-c", _MOUNT, str(folder)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {tried.stderr.strip()}")
    return prefix


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file-system", "file-limit"])
def test_a_disk_that_fills_up_in_the_middle_of_commits(kind: str, tmp_path: Path) -> None:
    prefix = _small_file_system(tmp_path) if kind == "file-system" else []
    found = _run(kind, tmp_path, prefix)
    assert found["lost"] == found["twice"] == 0
    assert found["too early"] == [] and found["receipts"] > 3 * _TRIALS < found["sends"]
    # It was the commits that failed, at both ends and at different ones.
    assert sum(found["aggregator"].values()) >= _TRIALS / 2, found
    assert sum(found["devices"].values()) >= _TRIALS / 2, found
    assert len(found["aggregator"]) >= 2 and len(found["devices"]) >= 2, found
