"""A device's install: the wheel of this checkout in a fresh virtual environment, without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# How pip words that it could not reach an index, as opposed to finding nothing that fits.
_UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|Failed to establish a new connection"
    r"|name resolution|ConnectTimeout|ReadTimeout|Network is unreachable",
    re.IGNORECASE,
)


class InstallError(RuntimeError):
    """Building or installing failed; the message ends with what pip said."""


class IndexUnreachable(InstallError):
    """Installing failed because no package index answered."""


@dataclass(frozen=True)
class DeviceInstall:
    """A virtual environment that holds the wheel and the device's dependencies, nothing more."""

    folder: Path

    @property
    def scripts(self) -> Path:
        """Where the environment keeps its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.scripts / ("python.exe" if os.name == "nt" else "python")

    def program(self, name: str) -> Path:
        """An installed command, such as tessera-device."""
        return self.scripts / (name + (".exe" if os.name == "nt" else ""))

    def size_bytes(self) -> int:
        """All files in the environment, pip and setuptools included, each at its length."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_dir())

    def packages(self) -> dict[str, str]:
        """Name and version of each installed distribution."""
        listed = _run([str(self.python), "-m", "pip", "list", "--format", "freeze"])
        return dict(line.split("==", 1) for line in listed.split() if "==" in line)


def build_wheel(into: Path) -> Path:
    """Build this checkout's wheel into a folder. Raises InstallError.

    Needs hatchling in the running environment, and no network.
    """
    pip = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(into)]
    _run([*pip, "--no-deps", "--no-build-isolation", "--no-index"])
    (wheel,) = into.glob("tessera_edge-*.whl")
    return wheel


def install_device(wheel: Path, folder: Path) -> DeviceInstall:
    """Make a virtual environment and install the wheel with its base dependencies, as pinned.

    Raises IndexUnreachable without a network, InstallError for anything else.
    """
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    install = DeviceInstall(folder)
    pip = [str(install.python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    _run([*pip, "--retries", "2", "--constraint", str(CONSTRAINTS), str(wheel)])
    return install


def _run(command: Sequence[str]) -> str:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # An interpreter started from another environment must not see that one's packages.
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        message = f"`{' '.join(command)}` failed with {done.returncode}:\n{said[-4000:]}"
        raise IndexUnreachable(message) if _UNREACHABLE.search(said) else InstallError(message)
    return done.stdout
