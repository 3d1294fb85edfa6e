"""A release of the product as its wheel installed it, beside the libraries that are here."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from benchmarks.device_install import ROOT

FIRST = "0.1.0"
_COMMITS = {FIRST: "1debb15a"}


class NotHere(RuntimeError):
    """The release cannot be built here; the message says why."""


@dataclass(frozen=True)
class Release:
    """``site``: the folder that holds its packages."""

    name: str
    site: Path

    def command(self, *arguments: str | Path) -> list[str]:
        """Of this Python, with the release's packages."""
        return [sys.executable, "-P", *map(str, arguments)]

    @property
    def environment(self) -> dict[str, str]:
        """In which its packages are found before any other's."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "ORT_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *arguments: str | Path) -> str:
        """What a command of its prints. Raises CalledProcessError."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.site.anchor,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    def aggregator(self, command: str, home: Path, *arguments: str) -> str:
        """Run a command of ``tessera-aggregator``."""
        return self.run("-m", "aggregator.cli", command, "--home", home, *arguments)

    def start(self, log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """A process of its, which writes to ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*arguments),
                env=self.environment,
                cwd=self.site.anchor,
                stdout=output,
                stderr=output,
            )


def this() -> Release:
    """The checkout."""
    return Release("this", ROOT)


def built(name: str, folder: Path) -> Release:
    """An earlier release: its wheel, built of the repository's history, unpacked by pip into a
    folder. Needs no network. Raises NotHere in a clone that lacks it."""
    commit = _COMMITS[name]
    archived = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False
    )
    if archived.returncode:
        raise NotHere(
            f"{name} is not in this clone's history (a shallow one?): commit {commit} is missing"
        )
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "sources"
        with tarfile.open(fileobj=BytesIO(archived.stdout)) as archive:
            archive.extractall(sources, filter="data")
        # What a build takes its version from where there is no repository.
        (sources / "PKG-INFO").write_text(
            f"Metadata-Version: 2.4\nName: tessera-edge\nVersion: {name}\n"
        )
        _pip("wheel", str(sources), "--no-build-isolation", "--wheel-dir", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        _pip("install", "--target", str(folder), str(wheel))
    return Release(name, folder)


def _pip(command: str, *arguments: str) -> None:
    pip: Sequence[str] = (sys.executable, "-m", "pip", command, "--quiet")
    done = subprocess.run(
        [*pip, "--no-deps", "--no-index", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT.anchor,
        check=False,
    )
    if done.returncode:
        raise NotHere(f"pip {command} failed: {done.stderr.strip()[-500:]}")
