"""The units of systemd say nothing wrong, and leave little open."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/tessera/bin"
_BOUND_SECONDS = 60
_MOST_EXPOSURE = 2.0


@cache
def why_not() -> str | None:
    """Why systemd-analyze cannot judge a unit here; None where it can."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return "systemd-analyze is not installed (apt-get install systemd)"
    try:
        done = subprocess.run(
            [program, "security", "--help"], capture_output=True, text=True, timeout=_BOUND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd-analyze does not work here: {error}"
    return None if "--offline" in done.stdout else "systemd-analyze is older than 250"


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if reason := why_not():
        pytest.skip(reason)
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=_BOUND_SECONDS
    )


@pytest.fixture(params=["tessera-aggregator.service", "tessera-device@.service"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit whose program lies where this environment has it; of a template, one instance."""
    name: str = request.param
    text = (UNITS / name).read_text()
    assert f"ExecStart={INSTALLED}/tessera-" in text
    path = tmp_path / name.replace("@.", "@hall-3.")
    path.write_text(text.replace(INSTALLED, str(Path(sys.executable).parent)))
    return path


def test_verify_has_nothing_to_say(unit: Path) -> None:
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verify_would_name_a_setting_that_does_not_exist(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectSystem=", "ProtectSytem="))
    assert "ProtectSytem" in analyze("verify", str(unit)).stderr


def test_little_is_exposed(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(unit))
    (found,) = re.findall(r"exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert float(found) <= _MOST_EXPOSURE, done.stdout


def test_each_user_of_a_unit_is_made() -> None:
    made = re.findall(r"^u (\S+)", (UNITS / "tessera.sysusers.conf").read_text(), re.MULTILINE)
    units = [path.read_text() for path in UNITS.glob("*.service")]
    assert sorted(made) == sorted(
        user for text in units for user in re.findall(r"^User=(.+)", text, re.MULTILINE)
    )
