"""Processor time, memory and written bytes of each kind of process that a fleet is served by."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KINDS = ("aggregator", "worker", "ray", "broker", "postgres", "generator")
"""``aggregator``: the whole one, or a cluster's coordinator; ``ray``: what Ray runs beside them."""


@dataclass(frozen=True)
class Usage:
    """By kind: processor seconds (user and system), MB in memory (shared pages by their share),
    bytes that were given to files."""

    seconds: Mapping[str, float]
    megabytes: Mapping[str, float]
    written: Mapping[str, float]


@dataclass(frozen=True)
class Meter:
    """Of processes by their id; those below them are found. ``postgres`` 0: there is none."""

    aggregator: int
    broker: int
    postgres: int = 0

    def workers(self) -> list[int]:
        """Process ids of the cluster's workers."""
        return sorted(pid for pid, kind in self._kinds().items() if kind == "worker")

    def read(self, *, memory: bool = False) -> dict[int, tuple[str, float, float, float]]:
        """By process: its kind, seconds, bytes written, and MB where ``memory`` is asked for, which
        takes the time to walk its pages."""
        found = {}
        for pid, kind in self._kinds().items():
            try:
                found[pid] = (
                    kind,
                    _seconds(pid, waited=pid == self.postgres),
                    _written(pid),
                    _megabytes(pid) if memory else 0.0,
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
        return found

    def _kinds(self) -> dict[int, str]:
        below: dict[int, list[int]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                below.setdefault(int(fields[1]), []).append(int(folder.name))
        kinds = {self.aggregator: "aggregator", self.broker: "broker", os.getpid(): "generator"}
        for pid in _descendants(self.aggregator, below):
            kinds[pid] = "worker" if _command(pid).startswith("ray::WorkerActor") else "ray"
        if self.postgres:
            for pid in (self.postgres, *_descendants(self.postgres, below)):
                kinds[pid] = "postgres"
        return kinds


def between(
    before: Mapping[int, tuple[str, float, float, float]],
    after: Mapping[int, tuple[str, float, float, float]],
) -> Usage:
    """What was used from one reading to the next; memory as it was at the second one."""
    seconds: defaultdict[str, float] = defaultdict(float)
    written: defaultdict[str, float] = defaultdict(float)
    megabytes: defaultdict[str, float] = defaultdict(float)
    for pid, (kind, used, wrote, holds) in after.items():
        _, used_before, wrote_before, _ = before.get(pid, (kind, 0.0, 0.0, 0.0))
        seconds[kind] += used - used_before
        written[kind] += wrote - wrote_before
        megabytes[kind] += holds
    return Usage(dict(seconds), dict(megabytes), dict(written))


def _descendants(pid: int, below: Mapping[int, list[int]]) -> list[int]:
    found = list(below.get(pid, ()))
    for each in found:
        found.extend(below.get(each, ()))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _seconds(pid: int, *, waited: bool) -> float:
    """``waited``: with those of children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = sum(int(field) for field in fields[11 : 15 if waited else 13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _written(pid: int) -> float:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def _megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("Pss:"))) / 1000
