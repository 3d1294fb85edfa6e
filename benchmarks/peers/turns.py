"""A framework's process: it runs one round whenever it is told to, and says what that cost.

NumPy and the standard library alone, for the frameworks' own environments import it too. Lines on
standard input say ``round`` or ``end``; each is answered by one line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from benchmarks.peers.workload import Floats, Workload


class Framework(Protocol):
    """Some framework's way through a workload."""

    items: Floats
    """float32 [items, k] as they stand."""
    users: Floats | None
    """float32 [devices, k] as they stand; None where they cannot be had."""

    def prepare(self, number: int) -> None:
        """Hand round ``number``'s triples to the framework, from 0; not timed."""

    def round(self, number: int) -> None:
        """Run it; returns when all of it is computed."""


class Measure(Protocol):
    """Reads what has been used so far."""

    def processor_seconds(self) -> float:
        """User and system time of the process and of all that it started."""

    def peak_bytes(self) -> int:
        """The most memory that they held at once."""


class OneProcess:
    """A :class:`Measure` of this process, whose children count once they have ended."""

    def processor_seconds(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    def peak_bytes(self) -> int:
        if sys.platform == "linux":
            # getrusage would tell the peak of the process that started this one, if that is higher.
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Turns:
    """Answers the lines; ``packages`` are those whose versions are told."""

    def __init__(self, workload: Workload, packages: tuple[str, ...], measure: Measure) -> None:
        self.workload = workload
        self._measure = measure
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        # What a framework prints would stand between the answers.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._say(
            versions={name: version(name) for name in packages},
            python=platform.python_version(),
        )

    def rounds(self, framework: Framework) -> None:
        """Rounds as they are asked for, until ``end``."""
        number = 0
        for line in sys.stdin:
            if line.strip() == "end":
                break
            framework.prepare(number)
            gc.collect()
            began, began_working = time.perf_counter(), self._measure.processor_seconds()
            framework.round(number)
            self._say(
                wall_seconds=time.perf_counter() - began,
                processor_seconds=self._measure.processor_seconds() - began_working,
            )
            number += 1
        errors: Mapping[str, float] = {}
        if number == self.workload.rounds:
            errors = self.workload.errors(framework.items, framework.users)
        self._say(errors=errors, peak_bytes=self._measure.peak_bytes())

    def _say(self, **found: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(found), file=self._answers, flush=True)


def take_turns(packages: tuple[str, ...], framework: Callable[[Workload], Framework]) -> None:
    """The whole of a process with one framework; the workload's path is its first argument."""
    workload = Workload.load(Path(sys.argv[1]))
    Turns(workload, packages, OneProcess()).rounds(framework(workload))
