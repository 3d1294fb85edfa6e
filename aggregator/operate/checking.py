"""What is wrong with a task file, and what each of its changes takes; asking changes nothing."""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.errors import AggregatorError, PacketsTooSmall
from aggregator.home import AggregatorHome
from aggregator.operate.lookup import task_to_change
from aggregator.operate.tasks import (
    STEP_SECONDS,
    file_path,
    found_from_anywhere,
    require_harmless_task,
    successor,
)
from aggregator.publish.publisher import largest_packet, packet_lines
from aggregator.rounds.model_parts import taken_for_one
from aggregator.rounds.replacement import buildable, fits, plan, require_fits
from aggregator.serve.successor import find_move, where_serve_is
from aggregator.serve.tasks import require_own
from aggregator.store import Store, TaskStore
from aggregator.store.rows import TaskRow
from aggregator.store.tasks import FIRST, require_room
from aggregator.task.artifacts import rehearsed
from aggregator.task.check import changes, taken_in
from aggregator.task.file import (
    FLEET_TABLES,
    Task,
    parse_task,
    read_continued_catalogue,
    read_task,
    understood_catalogue,
)
from device_sdk.artifact import read_manifest
from device_sdk.link.broker_url import BrokerWay

Checked = dict[str, Any]
"""What was found of a file, as ``task check --json`` prints it. ``problem``: None for none."""


@dataclass(frozen=True, slots=True)
class Looking:
    """How a file is looked at. ``data``: whose first device's samples it is rehearsed with, as
    ``MODULE:FUNCTION``; empty for made-up ones."""

    step_seconds: float = STEP_SECONDS
    data: str = ""


USUAL_LOOK = Looking()


def check_files(
    home: AggregatorHome,
    store: Store,
    file: Path | None,
    replaces: str | None,
    warm_start: str | None,
    looking: Looking,
) -> list[Checked]:
    """What is found of ``file``, as the task that it names or as what ``replaces`` is to be; of all
    the home's files without one. Raises AggregatorError for what does not go together."""
    rows = store.tasks.all()
    check = _Check(home, store, warm_start, looking, _packets(store))
    looks: list[Callable[[], Checked]]
    if file is None:
        if replaces or warm_start:
            raise AggregatorError("task check needs the FILE that the task is to be replaced by")
        looks = [partial(check.served, row) for row in rows]
    elif replaces is not None:
        looks = [partial(check.successor, task_to_change(store, replaces), file)]
    else:
        looks = [partial(check.named, rows, file)]
    return [_found(look) for look in looks]


def check_alone(file: Path, looking: Looking) -> Checked:
    """What is found of a file by itself, without a fleet."""
    return _found(
        lambda: _looked_at(file, parse_task(taken_in(file), file), looking, _packets(None))
    )


def _found(look: Callable[[], Checked]) -> Checked:
    try:
        return look()
    except AggregatorError as error:
        return {"problem": str(error)}


_Packets = Callable[[Task, Mapping[str, int]], list[str]]
"""Says of a task's messages, by their sizes, how the broker takes them."""


def _packets(store: Store | None) -> _Packets:
    rng = np.random.default_rng()

    @cache
    def ask(way: BrokerWay, proxy: str | None) -> int | None:
        return largest_packet(way, proxy, rng, time.monotonic)

    def words(task: Task, sizes: Mapping[str, int]) -> list[str]:
        broker = task.fleet.broker
        asked = partial(ask, proxy=broker.proxy)
        if store is None:
            return packet_lines([broker.way], sizes, asked, None)
        ways = where_serve_is(find_move(store), broker.way, time.time())
        return packet_lines(ways, sizes, asked, store.facts.packet_bytes)

    return words


@dataclass(frozen=True)
class _Check:
    """In a home."""

    home: AggregatorHome
    store: Store
    warm_start: str | None
    looking: Looking
    packets: _Packets

    def named(self, rows: list[TaskRow], file: Path) -> Checked:
        """A file of the home, or one to replace what it is named after, or a new task's."""
        name, is_first = _name_in(file)
        for row in rows:
            if file.resolve() == file_path(self.home, row).resolve():
                return self.served(row)
            if (row.name == name or (is_first and row.number == FIRST)) and row.served is not None:
                return self.successor(row, file)
        if self.warm_start is not None:
            raise AggregatorError(
                "--warm-start is for a task that is replaced: name it by --replace"
            )
        first = read_task(file_path(self.home, rows[0]))
        task = parse_task(taken_in(file), file.with_name(f"{name}.toml"), first.fleet, file)
        buildable(self.store, task)
        require_room(len(rows))
        return _looked_at(file, task, self.looking, self.packets) | {
            "next": f"task add {task.name} --from {file}"
        }

    def served(self, row: TaskRow) -> Checked:
        """A file of the home, which serve takes up as far as it can."""
        path = file_path(self.home, row)
        first = read_task(file_path(self.home, self.store.tasks.find(FIRST)))
        task = first if row.number == FIRST else read_task(path, first.fleet)
        stored = self.store.task(row.number)
        buildable(self.store, task)
        if task.catalogue is not None:
            read_continued_catalogue(task.catalogue, stored)
        said = _looked_at(path, task, self.looking, self.packets)
        if row.served is None:
            return said
        found = changes(
            row.served, task, partial(fits, stored), self.store.contents.used_by(row.number)
        )
        return said | {
            "changes": [asdict(each) for each in found],
            "waits": row.problem,
            "refused": _refused(stored, task) if row.request is None else None,
        }

    def successor(self, row: TaskRow, file: Path) -> Checked:
        """What ``task replace`` would do with a file."""
        stored = self.store.task(row.number)
        names, new = successor(self.home, self.store, row, file)
        planned = plan(stored, names, new, None)
        in_use = self.store.contents.used_by(row.number)
        found = changes(row.served or "", new, partial(fits, stored), in_use)
        replacement: dict[str, Any] = {
            "version": planned.method.version,
            "warm_start": found_from_anywhere(self.warm_start) or "latest",
            "problem": None,
        }
        try:
            inherits = plan(stored, names, new, replacement["warm_start"]).inherits
            assert inherits is not None
            replacement |= asdict(inherits)
        except AggregatorError as error:
            if self.warm_start is not None:
                raise  # as task replace would
            replacement["problem"] = str(error)
        return _looked_at(file, new, self.looking, self.packets) | {
            "changes": [asdict(each) for each in found],
            "replacement": replacement,
            "next": f"task replace {row.name} --from {file}",
        }


def _refused(store: TaskStore, task: Task) -> str | None:
    """Why a serve that starts would not go on with a task's state; None where it would."""
    try:
        require_own(store, task)
        require_fits(store, task)
    except AggregatorError as error:
        return str(error)
    return None


def _looked_at(path: Path, task: Task, looking: Looking, packets: _Packets) -> Checked:
    require_harmless_task(task, looking.step_seconds)
    shows = rehearsed(task, looking.step_seconds, looking.data)
    said = {"file": str(path), "task": task.name, "method": task.binding.method_name}
    alike = taken_for_one([read_manifest(each).name for each in task.artifacts])
    notes = [note for note in (task.note, alike) if note]
    problems = [each.problem for each in shows if each.problem is not None]
    lines = _each_line_once([each.lines for each in shows])
    sizes = Counter[str]()
    for each in shows:
        sizes |= Counter(each.sizes)
    told: list[str] = []
    try:
        told = packets(task, sizes)
    except PacketsTooSmall as error:
        problems.append(str(error))
    understood = None if task.catalogue is None else understood_catalogue(task.catalogue)[1]
    return {
        **said,
        "problem": f"{path}: {problems[0]}" if problems else None,
        "note": "; ".join(notes) or None,
        "catalogue": understood,
        "rehearsal": lines + told,
        "sizes": told,
    }


def _each_line_once(found: Sequence[Sequence[str]]) -> list[str]:
    """What was found of each artifact; what an earlier one had too is not told again."""
    lines: list[str] = []
    for told in found:
        new = [line for line in told if line not in lines]
        lines += new if len(new) == len(told) else [*new, "  else as those before"]
    return lines


def _name_in(path: Path) -> tuple[str, bool]:
    """The task that a file is of: its ``task.name``, or the file's own; and whether it has tables
    that the first task's alone has."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        found = values.get("task", {}).get("name")
    except (OSError, ValueError, RecursionError, AttributeError):
        return path.stem, False
    is_first = any(each in values for each in FLEET_TABLES)
    return found if isinstance(found, str) else path.stem, is_first and found is None
