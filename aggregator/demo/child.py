"""A child process that ends with the demo, and whose output goes to a file.

    python -m aggregator.demo.child COMMAND [ARGUMENT ...]

is a leash: it runs a command that ends when this process's standard input does. The demo holds the
other end of that pipe. Killed with -9 it can stop nobody, but the system closes its files: then the
command is told to stop, and killed where it does not. For programs that do not watch their standard
input themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_TERM_SECONDS = 10.0
_TAIL_LINES = 15
_GRACE_SECONDS = 8.0
ROOT = Path(__file__).resolve().parents[2]
"""Where the packages lie: children are started there, so that a bare checkout will do."""
# Many processes share the cores: one thread each, or they would spin against each other.
_ENVIRONMENT = {
    "ORT_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class FleetError(Exception):
    """A part of the fleet did not start, or ended; the message says which, and what it said."""


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
        """Start ``command`` where the packages lie, with its output in ``folder``/NAME.log.

        ``leash``: for a command that does not end with its standard input by itself.
        """
        log = folder / f"{name}.log"
        if leash:
            command = [sys.executable, "-m", "aggregator.demo.child", *command]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
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


@contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGINT and SIGTERM interrupt once; more of them wait until the children have ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, frame: None)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def leash(command: Sequence[str]) -> int:
    """Run the command; its exit status, as a shell would say it."""
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def stop(number: int, frame: FrameType | None) -> None:
        _terminate(process)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def watch() -> None:
        # Not sys.stdin, whose lock would still be held when the interpreter ends.
        while os.read(0, 1024):
            pass
        _terminate(process)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=watch, name="leash", daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        process.terminate()


if __name__ == "__main__":
    sys.exit(leash(sys.argv[1:]))
