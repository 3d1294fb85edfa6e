"""`make release`: sdist and wheel, attested, and tried as their users install them."""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from packaging.metadata import Metadata
from tabulate import tabulate

from benchmarks.device_install import CONSTRAINTS, ROOT, DeviceInstall
from benchmarks.harness import suite_parser
from benchmarks.releases import WITHOUT_CUDA

_DESCRIPTION = """\
Builds sdist and wheel into dist/, which is emptied first, and again from another folder: both must
have the same bytes. Their metadata must be valid, and their contents what they should be: the
packages and nothing of tests, no path of this machine, no private key. dist/SHA256SUMS then has
their digests. The wheel is installed into fresh environments outside of the checkout, for each
Python and each extra, where the commands must start and do a little of their work. The exit status
is 1 where something was not right."""
_EPILOG = """\
A Python is looked for on the PATH and among pyenv's; one that is not here is told, and not tried.
What is not committed is not released: the checkout has to be clean."""

PYTHONS = ("3.11", "3.12", "3.13")
PROGRAMS = ("tessera-device", "tessera-export", "tessera-aggregator")
PACKAGES = ("device_sdk", "aggregator", "export")
NOT_TRIED = ("dev", "docs")
"""Extras that are for a checkout."""


@dataclass(frozen=True)
class Trial:
    """An install to be tried: its extras, and what is run there, one after the other."""

    extras: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()


_SIMULATE = (
    ("tessera-aggregator", "simulate", "--example", "example"),
    (
        *("tessera-aggregator", "simulate", "example/task.toml"),
        *("--data", "example/data.py:devices", "--devices", "20", "--rounds", "2"),
    ),
)
_BENCH = ("--deadline", "0.5", "--items", "300", "--interactions", "100", "--max-k", "8")
TRIALS = {
    "": Trial(commands=(("tessera-device", "bench", *_BENCH, "--time-box", "4"),)),
    "aggregator": Trial(
        ("aggregator",), (("tessera-aggregator", "init", "--home", "fleet"), *_SIMULATE)
    ),
    "cluster": Trial(
        ("aggregator", "cluster"), (("python", "-c", "import aggregator.cluster.ray_runtime, ray"),)
    ),
    "demo": Trial(
        ("aggregator", "demo"),
        (("tessera-aggregator", "demo", "--devices", "4", "--rounds", "2"),),
    ),
    "export": Trial(
        ("export",),
        (("tessera-export", "mf", "-o", "model"), ("tessera-export", "inspect", "model")),
    ),
    "simulate": Trial(("aggregator", "simulate"), _SIMULATE),
    "tensorboard": Trial(
        ("aggregator", "tensorboard"), (_SIMULATE[0], (*_SIMULATE[1], "--sink", "tensorboard"))
    ),
}
"""By extra. Beside these every install is asked for the help and the version of each program."""


def trial_of(extra: str) -> Trial:
    """Of one without a trial of its own the programs are started, beside the aggregator."""
    return TRIALS.get(extra, Trial(("aggregator", extra)))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is right, 1 where it is not."""
    options = _parser().parse_args(arguments)
    try:
        wheel = attested(ROOT / "dist")
    except NotRight as error:
        print(f"not right: {error}", file=sys.stderr)
        return 1
    pythons = {version: found(version) for version in options.pythons}
    extras = ["", *(each for each in extras_of(wheel) if each not in NOT_TRIED)]
    rows = [
        (version, extra or "none", *_tried(wheel, python, trial_of(extra)))
        for version, python in pythons.items()
        if python is not None
        for extra in extras
        if options.extras is None or (extra or "none") in options.extras
    ]
    print(tabulate(rows, headers=("Python", "extra", "installed", "took", "")))
    for version, python in pythons.items():
        if python is None:
            print(f"Python {version} is not here: not tried")
    wrong = [row for row in rows if row[-1] != "right"]
    print(f"{len(wrong)} of {len(rows)} not right" if wrong or not rows else "all right")
    return int(bool(wrong) or not rows)


def _parser() -> argparse.ArgumentParser:
    parser = suite_parser("distributions", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--pythons", nargs="*", default=PYTHONS, metavar="X.Y", help=f"({', '.join(PYTHONS)})"
    )
    parser.add_argument(
        "--extras", nargs="*", metavar="EXTRA", help="try these alone; none: without any (all)"
    )
    return parser


class NotRight(RuntimeError):
    """What is wrong with the distributions."""


# Built twice, and looked into.


def attested(into: Path) -> Path:
    """Sdist and wheel in a folder, with their digests; the wheel. Raises NotRight."""
    if changed := _git("status", "--porcelain"):
        raise NotRight(f"commit what is to be released, or take it away:\n{changed}")
    shutil.rmtree(into, ignore_errors=True)
    built = build(ROOT, into)
    with _elsewhere() as (checkout, folder):
        again = {path.name: path for path in build(checkout, folder)}
        for path in built:
            if path.name not in again or digest(path) != digest(again[path.name]):
                raise NotRight(f"{path.name} built in another folder has other bytes")
    for path in built:
        if wrong := wrong_with(path, (str(ROOT), sys.prefix)):
            raise NotRight(f"{path.name}: " + "; ".join(wrong))
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in built)
    (into / "SHA256SUMS").write_text(sums, encoding="utf-8")
    for path in built:
        print(f"{path.name}: {len(contents(path))} files, {path.stat().st_size / 1e6:.2f} MB")
    print(f"the same bytes from two folders\n{sums}", end="", flush=True)
    (wheel,) = (path for path in built if path.suffix == ".whl")
    return wheel


def build(checkout: Path, into: Path) -> list[Path]:
    """Sdist, and the wheel that comes of it, as of the commit's time. Raises NotRight."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct")}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), checkout]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise NotRight(f"build failed: {(done.stdout + done.stderr)[-2000:]}")
    return sorted(into.iterdir())


@contextmanager
def _elsewhere() -> Iterator[tuple[Path, Path]]:
    """Another checkout of the same commit, and an empty folder."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "of" / "another"
        _git("worktree", "add", "--quiet", "--detach", str(checkout))
        try:
            yield checkout, Path(scratch) / "dist"
        finally:
            _git("worktree", "remove", "--force", str(checkout))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotRight(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def digest(path: Path) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(path: Path) -> dict[str, bytes]:
    """The files of a wheel, or of an sdist without its top folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {one: archive.read(one) for one in archive.namelist() if one[-1] != "/"}
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                files[member.name.partition("/")[2]] = file.read()
    return files


_METADATA = r".+\.dist-info/METADATA|PKG-INFO"
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


def wrong_with(path: Path, paths: Sequence[str]) -> list[str]:
    """What is wrong with a distribution, in words. ``paths``: of this machine, which it may not
    hold."""
    files = contents(path)
    wrong = [f"{name} is of a test" for name in files if re.search(r"(^|/)(tests?/|test_)", name)]
    for name, content in files.items():
        wrong += [f"{name} holds the path {each}" for each in paths if each.encode() in content]
        if _PRIVATE_KEY.search(content):
            wrong.append(f"{name} holds a private key")
    if path.suffix == ".whl":
        wrong += _wrong_with_wheel(files)
    (metadata,) = (
        each
        for name, each in files.items()
        if re.fullmatch(r"(.+\.dist-info/METADATA|PKG-INFO)", name)
    )
    try:
        said = Metadata.from_email(metadata, validate=True)
    except ExceptionGroup as error:
        return [*wrong, *(str(each) for each in error.exceptions)]
    if not said.description or said.description_content_type != "text/markdown":
        wrong.append("the metadata has no description in Markdown")
    return wrong


def _wrong_with_wheel(files: Mapping[str, bytes]) -> Iterator[str]:
    """What is in it, and whether its own list of digests says the same."""
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    tops = {name.partition("/")[0] for name in files} - {record.partition("/")[0]}
    if tops != set(PACKAGES):
        yield f"it holds {', '.join(sorted(tops))}"
    listed = {row[0]: row[1] for row in csv.reader(files[record].decode().splitlines())}
    for name, content in files.items():
        made = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != record and listed.get(name) != f"sha256={made}":
            yield f"RECORD has another digest of {name}"
    if listed.keys() != files.keys():
        yield f"RECORD lists other files: {', '.join(sorted(listed.keys() ^ files.keys()))}"


def extras_of(wheel: Path) -> list[str]:
    """Those that it provides."""
    (metadata,) = (each for name, each in contents(wheel).items() if name.endswith("/METADATA"))
    return sorted(message_from_bytes(metadata).get_all("Provides-Extra") or [])


# Installed and tried.


def found(version: str) -> Path | None:
    """An interpreter of this version that runs; version managers' shims may not."""
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *managed.glob(f"{version}.*/bin/python")]
    says = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):
        try:
            done = subprocess.run([candidate, "-c", says], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return Path(candidate)
    return None


def _tried(wheel: Path, python: Path, trial: Trial) -> tuple[str, str, str]:
    """How large the environment is, how long it took, and "right" or what was not."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        install = DeviceInstall(Path(scratch) / "venv")
        work = Path(scratch) / "work"
        work.mkdir()
        said, size = "right", ""
        try:
            _run([python, "-m", "venv", install.folder], work)
            _install(install, wheel, trial.extras, work)
            size = f"{install.size_bytes() / 1e6:,.0f} MB"
            for program in PROGRAMS:
                _run([install.program(program), "--help"], work)
                _run([install.program(program), "--version"], work)
            for program, *rest in trial.commands:
                _run([install.program(program), *rest], work)
        except NotRight as error:
            said = str(error)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"  {python} {','.join(trial.extras) or 'none'}: {said}, {took}", flush=True)
    return size, took, said


def _install(install: DeviceInstall, wheel: Path, extras: Sequence[str], work: Path) -> None:
    pip = [install.python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    if "export" in extras:
        # Where that has none, the next line takes PyPI's, on Linux with CUDA.
        subprocess.run(
            [*map(str, pip), "--retries", "0", "--index-url", WITHOUT_CUDA, "torch"],
            stderr=subprocess.DEVNULL,
            check=False,
        )
    named = f"[{','.join(extras)}]" if extras else ""
    _run([*pip, f"{wheel}{named}"], work)


def _run(command: Sequence[str | Path], work: Path) -> None:
    """In a folder outside of the checkout, as somebody who has none. Raises NotRight."""
    environment = {**os.environ, "PYTHONPATH": "", "ORT_DISABLE_TELEMETRY": "1"}
    words = [str(each) for each in command]
    done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotRight(f"{Path(words[0]).name} {' '.join(words[1:3])}: {' '.join(last)[:200]}")


if __name__ == "__main__":
    sys.exit(main())
