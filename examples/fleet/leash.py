"""Runs a command that ends when this process's standard input does.

    python -m examples.fleet.leash COMMAND [ARGUMENT ...]

The demo holds the other end of that pipe. Killed with -9 it can stop nobody, but the system closes
its files: then the command is told to stop, and killed where it does not. For programs that do not
watch their standard input themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_GRACE_SECONDS = 8.0


def main(command: Sequence[str]) -> int:
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
    sys.exit(main(sys.argv[1:]))
