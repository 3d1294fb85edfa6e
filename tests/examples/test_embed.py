"""The program that embeds a device, where it cannot join."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_a_mistyped_code_ends_it_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.embed", "mqtt://127.0.0.1:1", "film-1"],
        input="nonsense\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "embed: the enrolment code is mistyped: an enrolment code has 88 characters, 8 were given\n"
    )
