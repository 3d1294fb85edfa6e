"""`make newest`: the wheel with the newest and with the lowest releases of all that it requires.

Each in a fresh environment: the exporter's survey, which judges every step beside torch, and the
demo, which runs a broker, an aggregator and devices.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.device_install import ROOT, DeviceInstall, InstallError, build_wheel
from benchmarks.harness import suite_parser

EXTRAS = "aggregator,demo,export,simulate"
# Those of PyPI bring CUDA with them on Linux.
WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"
_DESCRIPTION = f"""\
Builds this checkout's wheel and installs it with its extras ({EXTRAS}) into fresh environments: one
with the newest releases of everything, one with the lowest that pyproject.toml allows. In each it
exports and verifies the survey's models that need nothing but torch, and runs the demo. The exit
status is 1 where one of them could not be installed, or something was not right."""
_EPILOG = f"""\
torch comes without CUDA where {WITHOUT_CUDA} has the release, else from PyPI,
on Linux with CUDA (6 GB an environment). pip's own settings hold but for constraints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The environments, one after the other. 0 where all is right, else 1."""
    options = _parser().parse_args(arguments)
    bad = []
    with _folder(options.folder) as folder:
        wheel = build_wheel(folder)
        for which, pins in PINS.items():
            if options.only not in (None, which):
                continue
            print(f"== the {which} releases", flush=True)
            try:
                _tried(wheel, pins(wheel), folder / which, options)
            except (InstallError, subprocess.CalledProcessError) as error:
                print(error, file=sys.stderr)
                bad.append(which)
    print(f"not right with the {' and the '.join(bad)} releases" if bad else "all right")
    return int(bool(bad))


def _parser() -> argparse.ArgumentParser:
    parser = suite_parser("releases", _DESCRIPTION, _EPILOG)
    parser.add_argument("--only", choices=PINS, help="one environment (default: all)")
    parser.add_argument("--python", default=sys.executable, help="that makes the environments")
    parser.add_argument("--models", default="", metavar="TEXT", help="whose name holds TEXT")
    parser.add_argument("--no-demo", action="store_true", help="leave the demo out")
    parser.add_argument(
        "--folder", type=_new, help="where the environments are made, and stay: a new folder"
    )
    return parser


def _new(given: str) -> Path:
    if Path(given).exists():
        raise argparse.ArgumentTypeError(f"{given} exists already: name another, or remove it")
    return Path(given)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def newest(wheel: Path) -> list[str]:
    """Nothing is pinned: pip takes what is newest."""
    return []


def lowest(wheel: Path) -> list[str]:
    """The wheel's own requirements, each at the lowest minor release that it allows."""
    return [
        f"{requirement.name}=={bound.version if '.' in bound.version else bound.version + '.0'}.*"
        for requirement in required(wheel)
        for bound in requirement.specifier
        if bound.operator == ">="
    ]


def required(wheel: Path) -> list[Requirement]:
    """What the wheel requires here, with ``EXTRAS``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        listed = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    extras = ("", *EXTRAS.split(","))
    return [
        each
        for each in map(Requirement, listed)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


PINS: Mapping[str, Callable[[Path], list[str]]] = {"newest": newest, "lowest": lowest}


def _tried(wheel: Path, pins: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    install = _installed(options.python, wheel, pins, folder)
    run = _beside_the_wheel(install, folder / "run")
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "PYTHONPATH": ""}

    def program(*arguments: str) -> None:
        command = [str(install.python), "-m", *arguments]
        subprocess.run(command, cwd=run, env=environment, check=True)

    survey = ["--quick", "--results", str(folder / "results"), "--only", options.models]
    program("benchmarks.export_survey", *survey)
    if not options.no_demo:
        program("examples.demo")


def _installed(python: str, wheel: Path, pins: Sequence[str], folder: Path) -> DeviceInstall:
    folder.mkdir()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    install = DeviceInstall(folder / "venv")
    # A cap of this machine's (PIP_CONSTRAINT, pip.conf) is none of pyproject.toml's.
    environment = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
    subprocess.run([python, "-m", "venv", str(install.folder)], check=True)
    pip = [str(install.python), "-m", "pip", "install", "--quiet"]
    (torch,) = (str(each) for each in required(wheel) if each.name == "torch")
    slim = ["--retries", "0", "--index-url", WITHOUT_CUDA, torch.partition(";")[0]]
    if subprocess.run([*pip, *slim], env=environment, stderr=subprocess.DEVNULL).returncode:
        print(f"{WITHOUT_CUDA} does not answer: torch comes from PyPI", flush=True)
    # By its name, too: else pip keeps the torch that is there, though PyPI has a newer one.
    asked = ["--upgrade", f"{wheel}[{EXTRAS}]", "torch"]
    subprocess.run([*pip, *asked], env=environment, check=True)
    for name, version in sorted(install.packages().items()):
        if name in _TOLD:
            print(f"{name} {version}", flush=True)
    print(f"{install.size_bytes() / 1e9:.1f} GB in all", flush=True)
    return install


_TOLD = ("numpy", "onnx", "onnxruntime", "sympy", "tessera-edge", "torch")


def _beside_the_wheel(install: DeviceInstall, folder: Path) -> Path:
    """The programs of this checkout, and the packages that the wheel installed."""
    folder.mkdir()
    for programs in ("benchmarks", "examples"):
        leave = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / programs, folder / programs, ignore=leave)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run(
        [str(install.python), "-c", where], stdout=subprocess.PIPE, text=True, check=True
    )
    for package in ("export", "device_sdk"):
        (folder / package).symlink_to(Path(done.stdout.strip()) / package)
    return folder


if __name__ == "__main__":
    sys.exit(main())
