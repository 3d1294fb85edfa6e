"""The tasks that are served: made from their files, and made anew when these or the operator's
wishes change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from aggregator.errors import AggregatorError, MethodFault, StateMismatch
from aggregator.events import LogEvent, about
from aggregator.home import AggregatorHome
from aggregator.publish.publisher import Publisher
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.ingest import Inbox, Ingest
from aggregator.rounds.machine import RoundMachine, held, hold_failed, try_again
from aggregator.rounds.replacement import replace_task
from aggregator.serve.housekeeping import Upkeep, file_stamp
from aggregator.shared import Shared
from aggregator.store import STORE_FAILURES, TaskStore
from aggregator.store.cluster import Deposed
from aggregator.store.rows import TaskRow
from aggregator.store.tasks import FIRST, require_room
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import (
    FLEET_TABLES,
    Task,
    parse_task,
    read_continued_catalogue,
    read_task,
    served_cohort,
)
from aggregator.task.request import ReplaceRequest, file_digest, write_task_files
from device_sdk.wire.codec.message import encode

_FLEET_TABLES = ", ".join(f"[{each}]" for each in FLEET_TABLES)


@dataclass(frozen=True)
class TaskParts:
    """What is there once for each task."""

    task: Task
    store: TaskStore
    aggregation: Aggregation
    rounds: RoundMachine
    ingest: Ingest
    publisher: Publisher
    upkeep: Upkeep


class MakeTask(Protocol):
    """Makes a task's parts from its store; ``failed``: without a call of its method's code."""

    def __call__(self, store: TaskStore, task: Task, *, failed: bool = False) -> TaskParts: ...


def claim(store: TaskStore, task: Task) -> None:
    """The first time that it is served decides what the stored state belongs to.

    Raises AggregatorError for a file of something else.
    """
    require_own(store, task)
    label = task.label
    stored = store.facts.label
    missing = task.catalogue is not None and store.facts.catalogue is None
    if stored is None or missing:
        with store.database.transaction():
            store.fleet.tasks.change(store.number, name=task.name)
            store.facts.label = label
            if task.catalogue is not None:
                found = read_continued_catalogue(task.catalogue, store)
                store.facts.catalogue = encode(found)


def require_own(store: TaskStore, task: Task) -> None:
    """Raises AggregatorError for a file of something else than the stored state is of."""
    stored = store.facts.label
    if stored is not None:
        _require_label(stored, task)
    other = store.fleet.tasks.named(task.name)
    if other is not None and other.number != store.number:
        raise AggregatorError(f"the home has another task that is named {task.name!r}")


def _require_label(stored: str, task: Task) -> None:
    """Raises AggregatorError for another task, or another method."""
    if stored == task.label:
        return
    name, _, method = stored.partition(" ")
    if name != task.name:
        raise AggregatorError(
            f"task.name is {task.name!r}; devices know it as {name!r}: leave it, or have another "
            "task with tessera-aggregator task add"
        )
    raise AggregatorError(
        f"task.method is {task.binding.method_name!r}, the task's model is of {method!r}: "
        "tessera-aggregator task replace begins with another method"
    )


def _require_same(before: TaskParts, found: Task) -> None:
    """Raises AggregatorError for what only a replacement may change."""
    task = before.task
    _require_label(task.label, found)
    if task.cohort != found.cohort:
        raise AggregatorError(
            f"task.cohort is {found.cohort!r}; devices know it as {task.cohort!r}: leave it, or "
            "have another task with tessera-aggregator task add"
        )
    if not before.publisher.offers(read_artifacts(found)):
        raise AggregatorError(
            "it names other artifacts than the ones in use, or what their folders hold has "
            "changed: tessera-aggregator task replace begins with others"
        )


class TaskBoard:
    """All tasks of the home, as served at present.

    Whatever changes is taken up in the way of a restart: the task's parts are made anew from its
    store, between two of its rounds, in one transaction with what changes there. A file that is not
    usable leaves the task as it was, and says so in the log and in ``status``.

    Whatever fails in a task's affairs (:meth:`within`), in the code of its method above all, holds
    that task alone. Its parts are thrown away, as if its process had been killed, and made anew
    from the store once it is let go: by ``release``, or when ``serve`` starts.
    """

    def __init__(
        self,
        home: AggregatorHome,
        shared: Shared,
        make: MakeTask,
        inbox: Inbox,
    ) -> None:
        self._home, self._make, self._inbox = home, make, inbox
        self._store, self._fleet = shared.store, shared.settings
        self._unix_clock = shared.unix_clock
        self._parts: dict[int, TaskParts] = {}
        self._absent: dict[int, str] = {}
        self._paused: set[int] = set()
        self._unwritable = ""
        self._stamps: dict[int, tuple[int, int]] = {}
        self._several = False
        self.revision = 0
        """Rises when the names that are served change, or whom a task is for."""

    @property
    def served(self) -> list[TaskParts]:
        """All tasks that are served, the first one first."""
        return list(self._parts.values())

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of those that are not served at present, and will be."""
        return tuple(self._absent.values())

    @property
    def names(self) -> list[tuple[str, str]]:
        """Task and cohort of each."""
        return [(parts.task.name, parts.task.cohort) for parts in self.served]

    @property
    def first(self) -> TaskParts:
        """The one that is always there."""
        return self._parts[FIRST]

    def about(self, parts: TaskParts) -> AbstractContextManager[None]:
        """What is logged meanwhile is about this task, which is named where there are several."""
        return self._about(parts.task.name)

    @contextmanager
    def within(self, parts: TaskParts) -> Iterator[None]:
        """What is done meanwhile is this task's affair: what fails there is its own end, and
        nobody else's. What the store does, and who takes our place, concerns all."""
        with self._about(parts.task.name):
            try:
                yield
            except (Deposed, *STORE_FAILURES):
                raise
            except Exception as error:
                parts.ingest.abandon()
                self._follow(parts, self._failed(parts.store, parts.task, error))

    def _about(self, name: str | None) -> AbstractContextManager[None]:
        return about((name or "") if self._several else "")

    def begin(self, first: Task) -> None:
        """Make all of them. Raises AggregatorError where the first one can be neither served nor
        replaced by what waits for that.

        ``first``: as its file had it, or as it was served in this process before. What its file
        says by now is taken up like any change of it.
        """
        row = self._store.tasks.find(FIRST)
        if row.unwritten is not None:  # committed, and no longer what ``first`` says
            first, _ = self._with_fleet(self._read(row))
        self._write_files()
        self._several = len(self._store.tasks.all()) > 1
        with self._about(first.name):
            try:
                self._put(FIRST, self._made_or_held(self._store.first, first))
            except AggregatorError as error:
                row = self._store.tasks.find(FIRST)
                if row.served is None:
                    raise
                if row.request is None or not self._replace(row):
                    raise AggregatorError(
                        f"task {row.name} cannot be served: {error}. Mend that, or have the task "
                        f"replaced when serve starts: tessera-aggregator task replace {row.name} "
                        "--from FILE"
                    ) from None
            else:
                self._note(FIRST, first, None)
                self._stamps.pop(FIRST)
        self.look_again()

    def look_again(self) -> bool:
        """The operator changed something in the store; whether anything was deleted."""
        deleted = False
        rows = self._store.tasks.all()
        self._several = len(rows) > 1
        self._write_files()
        for row in rows:
            with self._about(row.name):
                deleted |= self._look_at(row)
        return deleted

    def _look_at(self, row: TaskRow) -> bool:
        if row.state == "retiring":
            self._retire(row)
            return True
        if row.number not in self._parts:
            self._add(row)
        parts = self._parts.get(row.number)
        if parts is None:
            return row.request is not None and self._replace(row)
        with self.within(parts):
            self._pause(parts, row)
            parts.rounds.reload_hold()
            if parts.rounds.failed and held(parts.store) is None:
                self._follow(parts, self._made_or_held(parts.store, parts.task))
            elif parts.rounds.current is None and not parts.rounds.failed:
                parts.upkeep.between_rounds()
            return row.request is not None and self._replace(row)
        return False

    def between_rounds(self, parts: TaskParts) -> bool:
        """A round of a task ended: take up what waited for it; whether the parts are others now."""
        number = parts.store.number
        row = self._store.tasks.find(number)
        if row.request is None:
            return self._reload(parts)
        if self._replace(row):
            return True
        refused = self._store.tasks.find(number).problem
        changed = self._reload(parts)
        if refused is not None and self._store.tasks.find(number).problem is None:
            with self._store.database.transaction():
                self._store.tasks.change(number, problem=refused)  # the operator is to see it still
        return changed

    def look_at_files(self) -> bool:
        """Take up task files that changed, of tasks that have no round open, or one that rests or
        is held."""
        self._write_files()  # what there was no room for
        changed = False
        for parts in self.served:
            row = parts.rounds.current
            if row is None or row.held is not None or parts.rounds.rests:
                with self.within(parts):
                    changed |= self._reload(parts)
        for each in self._store.tasks.all():
            if each.number in self._absent:
                with self._about(each.name):
                    changed |= self._add(each)
        return changed

    def _add(self, row: TaskRow) -> bool:
        path = self._home.folder / row.file
        stamp = file_stamp(path)
        if self._stamps.get(row.number) == stamp:
            return False  # nothing that was wrong has changed
        self._stamps[row.number] = stamp
        store = self._store.task(row.number)
        try:
            task = self._read(row)
            require_room(len(self._parts))
            self._put(row.number, self._made_or_held(store, task))
        except AggregatorError as error:
            self._absent[row.number] = row.name or ""
            self._serve()
            self._say(row.number, f"it is not served: {error}")
            return False
        self._note(row.number, task, None)
        LogEvent.TASK_SERVED.log()
        return True

    def _reload(self, parts: TaskParts) -> bool:
        number, path = parts.store.number, parts.task.path
        stamp = file_stamp(path)
        if self._stamps.get(number) == stamp:
            return False
        if self._store.tasks.find(number).unwritten is not None:
            return False  # it holds what the task was before
        self._stamps[number] = stamp
        try:
            found = read_task(path, None if number == FIRST else self._fleet)
            if found.text == parts.task.text:
                self._note(number, parts.task, None)
                return False
            found, problem = self._with_fleet(found)
            _require_same(parts, found)
            with self._store.database.transaction():
                if parts.rounds.failed:
                    try_again(parts.store)
                made = self._made(parts.store, found)
        except (AggregatorError, MethodFault) as error:
            self._say(number, f"it goes on with the settings it had: {error}")
            return False
        made.rounds.follow(parts.rounds)
        self._follow(parts, made)
        self._note(number, found, problem)
        LogEvent.TASK_CHANGED.log()
        return True

    def _replace(self, row: TaskRow) -> bool:
        parts, store = self._parts.get(row.number), self._store.task(row.number)
        request = ReplaceRequest.read(row.request or "")
        # The round of a task that cannot be served, or is held, cannot end.
        if parts is None or parts.rounds.failed:
            pass
        elif parts.rounds.current is None:
            parts.upkeep.between_rounds()  # what was asked for before it
        elif not (request.now or parts.rounds.rests):
            return False
        path = self._home.folder / row.file if parts is None else parts.task.path
        fleet = None if row.number == FIRST else self._fleet
        try:
            if request.file not in ("", file_digest(path)):
                raise AggregatorError(
                    f"{path} was edited since task replace was called, which would overwrite that: "
                    "call it again"
                )
            task, problem = self._with_fleet(parse_task(request.text, path, fleet))
            with self._store.database.transaction():
                names = str(row.name), served_cohort(row.served or "")
                replace_task(store, names, task, request, int(self._unix_clock()))
                self._store.tasks.change(row.number, problem=problem)  # who waits sees both at once
                made = self._made(store, task)
        except (AggregatorError, MethodFault) as error:
            served = "" if parts is not None else "it is not served, and "
            with self._store.database.transaction():
                self._store.tasks.change(row.number, request=None)
                self._say(row.number, f"{served}it was not replaced: {error}")
            return False
        self._write_files()
        if parts is None:
            self._put(row.number, made)
        else:
            self._follow(parts, made)
        self._note(row.number, task, problem)
        LogEvent.TASK_REPLACED.log(generation=made.rounds.generation)
        return True

    def _read(self, row: TaskRow) -> Task:
        """What a task's file says, or is to say: it may be one that cannot be written now. Raises
        AggregatorError."""
        path, fleet = self._home.folder / row.file, None if row.number == FIRST else self._fleet
        if row.unwritten is None:
            return read_task(path, fleet)
        return parse_task(row.unwritten, path, fleet)

    def _with_fleet(self, task: Task) -> tuple[Task, str | None]:
        """With the fleet's tables that are in force, and whether the file has others."""
        if task.fleet == self._fleet:
            return task, None
        problem = f"changes of {_FLEET_TABLES} take effect when serve is restarted"
        return replace(task, fleet=self._fleet), problem

    def _made(self, store: TaskStore, task: Task) -> TaskParts:
        """Its parts; where they cannot be made, nothing of the store has changed."""
        with self._store.database.transaction():
            claim(store, task)
            return self._make(store, task)

    def _made_or_held(self, store: TaskStore, task: Task) -> TaskParts:
        """Its parts, as a process that starts makes them: what failed before is tried once more,
        and the task is held where it fails again."""
        try:
            try_again(store)
            return self._made(store, task)
        except StateMismatch as error:
            if self._store.tasks.find(store.number).served != task.text:
                raise
            # Of the settings that it was made with, it is its code's fault.
            return self._failed(store, task, error)
        except (AggregatorError, *STORE_FAILURES):
            raise
        except Exception as error:
            return self._failed(store, task, error)

    def _failed(self, store: TaskStore, task: Task, error: Exception) -> TaskParts:
        """Hold the task; its parts, which call none of its method's code."""
        with self._store.database.transaction():
            claim(store, task)
            hold_failed(store, task, error)
            return self._make(store, task, failed=True)

    def _write_files(self) -> None:
        try:
            write_task_files(self._home.folder, self._store)
            self._unwritable = ""
        except AggregatorError as error:
            if str(error) != self._unwritable:
                self._unwritable = str(error)
                # Done when it can be: the store knows what is due.
                LogEvent.TASK_FILE_UNWRITTEN.log(problem=error)

    def _retire(self, row: TaskRow) -> None:
        self._parts.pop(row.number, None)
        self._absent.pop(row.number, None)
        self._paused.discard(row.number)
        self._stamps.pop(row.number, None)
        for number in self._absent:
            self._stamps.pop(number, None)  # there is room for one of them now
        store = self._store.task(row.number)
        with self._store.database.transaction():
            generation = store.facts.generation
            store.publications.withdraw()
            self._store.contents.keep(row.number, ())
            self._store.tasks.erase(row.number)
            store.facts.clear()
            store.facts.own_generation = generation
            self._store.tasks.change(row.number, served=None)
            self._store.tasks.change(row.number, state="retired")
        self._several = len(self._store.tasks.all()) > 1
        self._serve()
        LogEvent.TASK_RETIRED.log()

    def _follow(self, parts: TaskParts, made: TaskParts) -> None:
        made.ingest.follow(parts.ingest)
        self._put(parts.store.number, made)

    def _put(self, number: int, parts: TaskParts) -> None:
        self._pause(parts, self._store.tasks.find(number))
        self._parts[number] = parts
        self._parts = dict(sorted(self._parts.items()))
        self._absent.pop(number, None)
        self._serve()

    def _pause(self, parts: TaskParts, row: TaskRow) -> None:
        """Have it be paused, or not, as the operator wants it."""
        parts.rounds.paused = row.state == "paused"
        if parts.rounds.paused == (row.number in self._paused):
            return
        self._paused ^= {row.number}
        with self._about(row.name):
            if parts.rounds.paused:
                LogEvent.TASK_PAUSED.log()
            else:
                LogEvent.TASK_RESUMED.log()

    def _serve(self) -> None:
        self.revision += 1
        ingests = {each.task.name: each.ingest for each in self._parts.values()}
        self._inbox.serve(ingests, self._absent.values())

    def _note(self, number: int, task: Task, problem: str | None) -> None:
        """It is served with these settings."""
        self._stamps[number] = file_stamp(task.path)
        row = self._store.tasks.find(number)
        file = str(task.path)
        if task.path.is_relative_to(self._home.folder):
            file = str(task.path.relative_to(self._home.folder))
        if (row.served, row.problem, row.file) != (task.text, problem, file):
            with self._store.database.transaction():
                if row.served not in (None, task.text):
                    version = self._store.task(number).checkpoints.get("version")
                    next_version = 0 if version is None else version.version + 1
                    self._store.task(number).facts.keep_file(next_version, row.served)
                self._store.tasks.change(number, served=task.text)
                self._store.tasks.change(number, problem=problem)
                self._store.tasks.change(number, file=file)
        if problem is not None:
            with about(task.name):
                LogEvent.TASK_WAITS.log(problem=problem)

    def _say(self, number: int, problem: str) -> None:
        row = self._store.tasks.find(number)
        with about(row.name or ""):
            LogEvent.TASK_REFUSED.log(problem=problem)
        with self._store.database.transaction():
            self._store.tasks.change(number, problem=problem)
