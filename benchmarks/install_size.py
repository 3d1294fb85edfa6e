"""Size and import time of the device install, against torch and against their budget."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from tabulate import tabulate

from benchmarks.device_install import DeviceInstall, InstallError, build_wheel, install_device

SIZE_BUDGET_MB = 200.0
IMPORT_BUDGET_SECONDS = 0.3

_DESCRIPTION = f"""\
Builds this checkout's wheel, installs it with the device's dependencies into a fresh virtual
environment, and measures what a device pays: megabytes (10^6 bytes) of the whole environment, pip
and setuptools included, and seconds until `import device_sdk` and its Trainer are there. torch is
measured where the running environment has it. The budget: {SIZE_BUDGET_MB:g} MB and
{IMPORT_BUDGET_SECONDS:g} s."""

_TIMED = """
import sys, time
started = time.perf_counter()
{statement}
print(time.perf_counter() - started)
"""
_DEVICE_IMPORT = "import device_sdk; device_sdk.Trainer"


@dataclass(frozen=True)
class Footprint:
    """What one install costs. Sizes in 10^6 bytes; the time is a median over fresh processes."""

    what: str
    size_mb: float
    import_seconds: float
    runs: int


def import_seconds(python: Path, statement: str, runs: int) -> float:
    """Median seconds that a statement takes in a fresh interpreter, its own start left out.

    One run more comes first and does not count: it fills the disk cache, as any second start does.
    Raises subprocess.CalledProcessError where the statement fails.
    """
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}
    environment.pop("PYTHONPATH", None)
    times = []
    with tempfile.TemporaryDirectory() as elsewhere:  # so that no checkout is on the path
        for _ in range(runs + 1):
            done = subprocess.run(
                [str(python), "-c", _TIMED.format(statement=statement)],
                cwd=elsewhere,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times.append(float(done.stdout))
    return statistics.median(times[1:])


def device_footprint(install: DeviceInstall, runs: int) -> Footprint:
    """Measure an installed device. The size is taken after the imports, compiled files included."""
    seconds = import_seconds(install.python, _DEVICE_IMPORT, runs)
    return Footprint("device install", install.size_bytes() / 1e6, seconds, runs)


def torch_footprint(runs: int) -> Footprint | None:
    """torch and what it requires, in the running environment; None where there is no torch."""
    try:
        size = sum(_installed_bytes(name) for name in _closure("torch"))
    except metadata.PackageNotFoundError:
        return None
    seconds = import_seconds(Path(sys.executable), "import torch", runs)
    return Footprint("torch and its requirements", size / 1e6, seconds, runs)


def _closure(name: str) -> set[str]:
    """The distribution and all it requires that is installed, extras left out."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop().lower().replace("_", "-")
        if current in found:
            continue
        try:
            requirements = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            if current == name:
                raise
            continue  # required on other platforms only
        found.add(current)
        waiting += [
            re.split(r"[^\w.-]", text, maxsplit=1)[0]
            for text in requirements
            if "extra ==" not in text
        ]
    return found


def _installed_bytes(name: str) -> int:
    paths = [Path(str(file.locate())) for file in metadata.files(name) or []]
    return sum(path.lstat().st_size for path in paths if path.is_file())


def over_budget(device: Footprint) -> list[str]:
    """One sentence for each budget that the device install exceeds."""
    found = []
    if device.size_mb > SIZE_BUDGET_MB:
        found.append(f"{device.size_mb:.0f} MB installed; the budget is {SIZE_BUDGET_MB:g} MB")
    if device.import_seconds > IMPORT_BUDGET_SECONDS:
        found.append(
            f"{device.import_seconds:.2f} s to import; the budget is {IMPORT_BUDGET_SECONDS:g} s"
        )
    return found


def main() -> int:
    """0 within the budget or without --check, 1 over it, 2 where nothing could be installed."""
    parser = argparse.ArgumentParser(prog="benchmarks.install_size", description=_DESCRIPTION)
    parser.add_argument("--check", action="store_true", help="fail when over the budget")
    parser.add_argument("--runs", type=int, default=7, help="processes a median (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is at least 1, not {arguments.runs}")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            install = install_device(build_wheel(Path(scratch)), Path(scratch) / "device")
        except InstallError as error:
            print(error, file=sys.stderr)
            return 2
        device = device_footprint(install, arguments.runs)
    torch = torch_footprint(arguments.runs)
    _report([device] if torch is None else [device, torch], as_json=arguments.json)
    problems = over_budget(device)
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    return 1 if arguments.check and problems else 0


def _report(footprints: list[Footprint], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(footprint) for footprint in footprints], indent=2))
        return
    rows = [[row.what, row.size_mb, row.import_seconds, row.runs] for row in footprints]
    headers = ["install", "MB", "import, s", "runs"]
    print(tabulate(rows, headers=headers, floatfmt=("", ".0f", ".3f", "")))


if __name__ == "__main__":
    sys.exit(main())
