"""A child process that ends with the demo, and whose output goes to a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_TERM_SECONDS = 10.0
_TAIL_LINES = 15
# Many processes share the cores: one thread each, or they would spin against each other.
_ENVIRONMENT = {
    "ORT_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Child:
    """Made by :meth:`start`. Its standard input is a pipe that closes if the demo is killed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], folder: Path, *, leash: bool = False
    ) -> Child:
        """Start ``command`` in the repository's root, with its output in ``folder``/NAME.log.

        ``leash``: for a command that does not end with its standard input by itself (``leash.py``).
        """
        log = folder / f"{name}.log"
        if leash:
            command = [sys.executable, "-m", "examples.fleet.leash", *command]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C is the driver's to handle: it ends its children in their order.
                start_new_session=sys.platform != "win32",
            )
        return cls(name, process, log)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting."""
        if self.running:
            self.process.terminate()

    def stop(self, timeout_seconds: float = _TERM_SECONDS) -> None:
        """SIGTERM, and SIGKILL to one that does not end in time."""
        self.ask_to_stop()
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _kill(self) -> None:
        if sys.platform == "win32":
            self.process.kill()
            return
        # The whole group, of which it is the first: a leash would leave its command behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])
