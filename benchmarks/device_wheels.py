"""Whether every dependency of the device has a binary wheel on every platform that devices run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename
from tabulate import tabulate

from benchmarks.device_install import CONSTRAINTS, ROOT

_DESCRIPTION = """\
Asks pip for the device's dependencies as binary wheels (`pip download --only-binary=:all:`) for
Linux x86-64 and aarch64, macOS arm64 and Windows, whatever this machine is, and prints what it
found. Fails when a platform lacks one. Downloads a few hundred megabytes into a temporary folder
unless pip's cache has them."""


@dataclass(frozen=True)
class Platform:
    """A platform of devices, with pip's tags for it, newest first."""

    name: str
    tags: tuple[str, ...]


# pip takes these tags as a closed list, so older glibc levels have to be named one by one.
_GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_17")


def _linux(machine: str) -> tuple[str, ...]:
    return (*(f"manylinux_{level}_{machine}" for level in _GLIBC), f"manylinux2014_{machine}")


PLATFORMS = (
    Platform("Linux x86-64", _linux("x86_64")),
    Platform("Linux aarch64", _linux("aarch64")),
    Platform("macOS arm64", ("macosx_14_0_arm64",)),
    Platform("Windows", ("win_amd64",)),
)


class Missing(RuntimeError):
    """pip found no set of binary wheels; the message is what it said."""


def device_requirements() -> list[str]:
    """The base dependencies as pyproject.toml states them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def download(platform: Platform, python_version: str, into: Path) -> dict[str, Path]:
    """Resolve and download the wheels for one platform, by distribution name. Raises Missing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(into)]
    command += ["--only-binary", ":all:", "--python-version", python_version]
    command += ["--constraint", str(CONSTRAINTS)]
    for tag in platform.tags:
        command += ["--platform", tag]
    done = subprocess.run(
        [*command, *device_requirements()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(done.stderr.strip()[-2000:])
    return {str(parse_wheel_filename(path.name)[0]): path for path in into.glob("*.whl")}


def table(found: dict[str, dict[str, Path]]) -> str:
    """A row a distribution, a column a platform: version and megabytes of the wheel."""
    names = sorted({name for wheels in found.values() for name in wheels})
    rows = [
        [name, *(_cell(wheels[name]) if name in wheels else "" for wheels in found.values())]
        for name in names
    ]
    return tabulate(rows, headers=["distribution", *found])


def _cell(wheel: Path) -> str:
    version = parse_wheel_filename(wheel.name)[1]
    return f"{version} ({wheel.stat().st_size / 1e6:.1f} MB)"


def main() -> int:
    """0 where every platform has every wheel, else 1."""
    parser = argparse.ArgumentParser(prog="benchmarks.device_wheels", description=_DESCRIPTION)
    parser.add_argument(
        "--python-version",
        default="3.11",
        metavar="X.Y",
        help="the devices' Python (default 3.11)",
    )
    arguments = parser.parse_args()
    found: dict[str, dict[str, Path]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for platform in PLATFORMS:
            folder = Path(scratch) / platform.tags[0]
            try:
                found[platform.name] = download(platform, arguments.python_version, folder)
            except Missing as error:
                missing[platform.name] = str(error)
        if found:
            print(table(found))
    for name, said in missing.items():
        print(f"\n{name}: not every dependency has a binary wheel\n{said}", file=sys.stderr)
    if not missing:
        print(f"\nPython {arguments.python_version}: every dependency, every platform")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
