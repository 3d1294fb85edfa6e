"""Frameworks as processes: each in an environment of its own, answering line by line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import Costs, Round

_ROOT = Path(__file__).resolve().parents[2]
_PINS = Path(__file__).with_name("requirements")
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One framework's way of running rounds.

    Attributes:
        name: in the table.
        module: of this package; takes the workload's path and then ``arguments``.
        arguments: ``{temporary}`` in one stands for a folder that is removed afterwards.
        environment: names the file of pins and the environment; empty for Tessera's own.
        by_turns: whether it rests while others have their turn. One that does not is measured by
            itself.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: str = ""
    by_turns: bool = True


class Peer:
    """The row's process; it has read the workload."""

    def __init__(self, row: Row, workload: Path, environments: Path, temporary: Path) -> None:
        python = _python(row.environment, environments)
        self._name = row.name
        self._errors = (temporary / "errors.txt").open("w+", encoding="utf-8")
        arguments = [one.format(temporary=temporary) for one in row.arguments]
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.peers.{row.module}", str(workload), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=_ROOT,
            env=_environment(temporary),
        )
        told = self._answer()
        self._versions = {**told["versions"], "python": told["python"]}
        self._rounds: list[Round] = []

    def round(self) -> Round:
        """Run the next round. Raises SystemExit with what the process said when it fails."""
        self._rounds.append(Round(**self._ask("round")))
        return self._rounds[-1]

    def end(self) -> Costs:
        """What all of them cost; the process then ends by itself."""
        found = self._ask("end")
        return Costs(self._versions, tuple(self._rounds), found["errors"], found["peak_bytes"])

    def close(self) -> None:
        """End the process if it still runs."""
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            # Its input has ended, which tells it to.
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise SystemExit(f"{self._name} failed:\n{self._errors.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def started(row: Row, workload: Path, environments: Path) -> Iterator[Peer]:
    """The row's process, ended with the block, and what it wrote removed."""
    # Ray makes sockets below it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        peer = Peer(row, workload, environments, Path(folder))
        try:
            yield peer
        finally:
            peer.close()


def install(rows: Sequence[Row], environments: Path) -> None:
    """Make the environments that the rows need, or make them anew where pins have changed."""
    for name in dict.fromkeys(row.environment for row in rows if row.environment):
        pins = _PINS / f"{name}.txt"
        python = _python(name, environments)
        stamp = environments / f".venv-{name}" / ".installed"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == pins.read_text(encoding="utf-8"):
            continue
        print(f"installing {pins} into {stamp.parent}", file=sys.stderr, flush=True)
        venv.create(stamp.parent, with_pip=True, clear=True)
        # Every package is pinned, so that nothing is left to choose.
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-cache-dir",
            "--no-deps",
            "-r",
            str(pins),
        ]
        kept = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
        subprocess.run(command, check=True, env=kept)
        stamp.write_text(pins.read_text(encoding="utf-8"), encoding="utf-8")


def _python(environment: str, environments: Path) -> Path:
    if not environment:
        return Path(sys.executable)
    folder = environments / f".venv-{environment}"
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _environment(temporary: Path) -> dict[str, str]:
    home = temporary / "home"
    home.mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        # One thread for NumPy everywhere; JAX and Ray take the cores that they find.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "ORT_DISABLE_TELEMETRY": "1",
        "HOME": str(home),
        "FLWR_HOME": str(home / "flower"),
    }
