"""A run's processes: started by fork from a server that has everything imported, killed at will."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.faults.aggregator_process",
        "tests.faults.cluster_process",
        "tests.faults.device_process",
        "tests.faults.crash_points",
    ]
)


class Victim:
    """One process that is started again and again. ``arguments`` come before (point, calls).

    ``who`` it is, for people; ``points`` at which it may be told to kill itself.
    """

    def __init__(
        self,
        work: Callable[..., None],
        arguments: tuple[Any, ...],
        who: str = "",
        points: Collection[str] = (),
    ) -> None:
        self.who, self.points = who, tuple(points)
        self._work = work
        self._arguments = arguments
        self._process: BaseProcess | None = None
        self._limits: tuple[int, int] | None = None
        self.point = ""

    def start(self, point: str = "", calls: int = 0) -> None:
        """Start; at the ``calls``-th passage of ``point`` it will kill itself."""
        self.point = point
        self._limits = None
        process = _CONTEXT.Process(
            target=self._work, args=(*self._arguments, point, calls), daemon=True
        )
        process.start()
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def is_process(self, pid: int) -> bool:
        """Whether it is this one."""
        return self._process is not None and self._process.pid == pid

    def ended(self) -> int | None:
        """The exit code of a process that is gone, -9 for one killed; None while it runs."""
        assert self._process is not None
        return self._process.exitcode

    def kill(self) -> None:
        """kill -9, and wait for it."""
        assert self._process is not None
        self._process.kill()
        self._process.join()

    def leave(self) -> Victim:
        """The process as a victim of its own: another one can be started in its place."""
        left = copy.copy(self)
        self._process = None
        return left

    def pause(self) -> None:
        """SIGSTOP: alive for the kernel, dead for everybody else."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def fill_disk(self) -> None:
        """No file of this process may grow any more."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._limits = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (4096, self._limits[1]))

    def free_disk(self) -> None:
        """There is room again."""
        if self._limits is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, self._limits)
        self._limits = None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Program(Victim):
    """A command, started in the same way; at no point does it kill itself. ``log`` gets what it
    says."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, who: str
    ) -> None:
        super().__init__(lambda: None, (), who)
        self._command, self._environment, self.log = list(command), environment, log
        self._running: subprocess.Popen[bytes] | None = None

    def start(self, point: str = "", calls: int = 0) -> None:
        """See :class:`Victim`."""
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment
            )

    @property
    def pid(self) -> int:
        """See :class:`Victim`."""
        assert self._running is not None
        return self._running.pid

    def ended(self) -> int | None:
        """See :class:`Victim`."""
        return 0 if self._running is None else self._running.poll()

    def kill(self) -> None:
        """See :class:`Victim`."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
