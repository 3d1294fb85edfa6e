"""The units are what systemd reads, and leave the services little to do harm with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parent.parent.parent / "deploy" / "systemd"
NAMES = sorted(path.name for path in UNITS.glob("*.service"))
_MOST_SECONDS = 60.0
_MOST_EXPOSED = 2.0
"""Of ten; what systemd-analyze calls OK ends at 4.9."""


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *map(str, arguments)]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"systemd-analyze does not run here: {error}")


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With programs that there are: verify looks for them."""
    if "systemd 2" not in analyze("--version").stdout:
        pytest.skip("there is no systemd-analyze here")
    folder = tmp_path_factory.mktemp("units")
    for name in NAMES:
        text = (UNITS / name).read_text()
        text = re.sub(r"/opt/tessera/bin/[a-z-]+", str(shutil.which("true")), text)
        (folder / name.replace("@", "@hall")).write_text(text)
    return folder


def test_both_ends_have_a_unit() -> None:
    assert NAMES == ["tessera-aggregator.service", "tessera-device@.service"]


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_hardened(name: str, units: Path) -> None:
    unit = units / name.replace("@", "@hall")
    said = analyze("security", "--offline=true", "--no-pager", unit)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said.stdout)
    if found is None:
        pytest.skip(f"systemd-analyze judges no unit offline here: {said.stderr.strip()}")
    assert float(found[1]) <= _MOST_EXPOSED, said.stdout


@pytest.mark.parametrize("name", NAMES)
def test_systemd_knows_each_line_of_a_unit(name: str, units: Path) -> None:
    said = analyze("verify", "--man=no", units / name.replace("@", "@hall"))
    unknown = [
        line
        for line in said.stderr.splitlines()
        if re.search(r"Unknown (key|section|lvalue)|Failed to parse|Invalid", line)
    ]
    assert unknown == []
