"""Models: the versions of a task's model, how good each is, kept, gone back to, taken away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from aggregator.console.pages.page import ConsolePage, PageQuery, task_asked
from aggregator.models import Format
from aggregator.operate.fleet import Fleet
from aggregator.operate.versions import FleetVersions
from aggregator.store.rows import VersionRow
from device_sdk.system.printable import ago, printable, size

_MOST = 300


@dataclass(frozen=True, slots=True)
class VersionLine:
    """A version, in text.

    Attributes:
        figure: by what versions are compared; ``others``: all the other ones.
        origin: where it is from where no round made it.
        files: by which ending its model can be taken away; none where it is kept no longer.
    """

    version: int
    round: str
    made: str
    devices: int
    figure: str
    others: str
    size: str
    origin: str
    best: bool
    pinned: bool
    awaited: bool
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelsView:
    """A task's versions, the newest first. ``best_by``: by what they are compared; empty: by
    nothing; ``rollback``: what there is to say of the version that was asked for last; ``dropped``:
    whether those are shown whose models are kept no longer; ``more``: how many are not shown."""

    task: str
    tasks: tuple[str, ...]
    versions: tuple[VersionLine, ...]
    best_by: str
    rollback: str
    awaits: bool
    dropped: bool
    more: int


def _read(fleet: Fleet, query: PageQuery) -> ModelsView:
    task, tasks = task_asked(fleet, query)
    dropped = query.get("all") is not None
    found, now = fleet.versions(task, dropped=dropped), fleet.now()
    return ModelsView(
        task=task,
        tasks=tasks,
        versions=tuple(_line(each, found, now) for each in found.versions[:_MOST]),
        best_by="" if found.ranking is None else printable(found.ranking.metric),
        rollback=found.rollback.said or "",
        awaits=found.rollback.version is not None,
        dropped=dropped,
        more=max(0, len(found.versions) - _MOST),
    )


def _line(row: VersionRow, of: FleetVersions, now: float) -> VersionLine:
    by = "" if of.ranking is None else of.ranking.metric
    others = [f"{printable(n)} {v:.4g}" for n, v in sorted(row.metrics.items()) if n != by]
    return VersionLine(
        row.version,
        str(row.round) if row.round else "-",
        ago(row.closed_unix_seconds, now),
        row.devices,
        f"{row.metrics[by]:.4g}" if by in row.metrics else "-",
        ", ".join(others) or "-",
        size(row.bytes) if row.bytes else "-",
        printable(row.origin or "-"),
        row.version == of.best,
        row.pinned,
        row.version == of.rollback.version,
        get_args(Format) if row.kept else (),
    )


MODELS = ConsolePage("models", "Models", _read, frozenset({"task", "all"}))
