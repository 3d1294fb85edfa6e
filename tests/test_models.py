"""The protocol's models: what was broken is found under the old rules, and is mended."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "docs/models/check.py"
_MISSING = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]


@pytest.mark.parametrize(
    "models, searches, violations",
    [
        (["--model", "ledger"], 2, 1),
        pytest.param([], 13, 7, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
    ids=["ledger", "all"],
)
@pytest.mark.skipif(bool(_MISSING), reason=f"the model checker needs {' and '.join(_MISSING)}")
def test_old_rules_break_what_the_rules_in_force_keep(
    models: list[str], searches: int, violations: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK), "--brief", *models],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{searches} of {searches} searches came to what they have to" in done.stdout
    assert done.stdout.count("| a violation |") == violations
