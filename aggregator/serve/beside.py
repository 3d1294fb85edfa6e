"""The console, which ``serve`` runs beside itself in a process that may come to any harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from aggregator.events import LogEvent
from device_sdk.system.printable import printable

READY = "the console is at "
"""What it prints as soon as it answers, before its URL."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_END_SECONDS = 5.0


def console_command(home: Path, task_file: Path) -> list[str]:
    """What starts it, as it is started here: it ends when its standard input does."""
    own = ["console", "--home", str(home.absolute()), "--task", str(task_file.absolute())]
    return [sys.executable, "-P", "-m", "aggregator.cli", *own, "--until-closed"]


class Beside:
    """Runs ``command`` for as long as a ``with`` lasts. One that ends is started again after a
    pause, twice as long each time, until it answers. It ends with this process, however that ends.

    ``wait``: for so many seconds, or until what is given is set; whether it is.
    """

    def __init__(
        self,
        command: Sequence[str],
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._command, self._wait = command, wait
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        self._answers = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def problem(self) -> str:
        """Why it does not answer; empty while it does, and at first."""
        return self._problem

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ending.set()
        process = self._process
        if process is not None:
            _end(process)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._ending.is_set():
            self._answers = False
            said = self._live()
            if self._ending.is_set():
                return
            if self._answers:
                pause_seconds = _FIRST_PAUSE_SECONDS
            if said != self._problem:
                LogEvent.CONSOLE_ENDED.log(problem=said)
            self._problem = said
            self._wait(self._ending, pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _live(self) -> str:
        """One life: what it said at its end."""
        from device_sdk.trial import where_modules_are  # loads what no serve without it needs

        try:
            process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(where_modules_are())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is serve's: it ends the console itself
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            return f"no process could be started ({error})"
        self._process = process
        if self._ending.is_set():  # since it was looked at last
            _end(process)
        last = ""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                text = printable(line.decode(errors="replace").rstrip())
                last = text or last
                if text.startswith(READY):
                    self._answers, self._problem = True, ""
                if text:
                    LogEvent.CONSOLE_SAID.log(text=text)
        said = last.removeprefix("tessera-aggregator: ")
        return said if said and not self._answers else f"it ended with {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
