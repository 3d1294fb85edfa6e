"""The tasks of a fleet: listed, added, replaced, paused, retired, gone back with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, is_served
from aggregator.operate.lookup import task_to_change
from aggregator.operate.names import served_task_of
from aggregator.rounds.replacement import begins_anew, buildable, misfit, other_frozen, plan
from aggregator.store import Store
from aggregator.store.rows import TaskRow
from aggregator.store.tasks import FIRST, require_room
from aggregator.task.artifacts import require_harmless
from aggregator.task.check import put_in, taken_in, without_fleet
from aggregator.task.file import (
    FLEET_TABLES,
    Task,
    parse_task,
    read_task,
    served_cohort,
    shipped_folder,
)
from aggregator.task.request import ReplaceRequest, file_digest, write_task_files
from aggregator.task.warm_start import WarmStart
from device_sdk.artifact.errors import ArtifactError
from device_sdk.wire.codec.message import require_name

STEP_SECONDS = 30.0
"""What one step of an artifact may take, which is tried before any device does it."""
WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.05
_MOST_NAMED = 8

# What there is.


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task of the fleet.

    Attributes:
        name: None for the first one before it was served; so ``method`` too.
        state: "active", "paused", "retiring", "waits to be replaced" or "not served yet".
        generation: Unix time of when it was made or replaced.
        version: of its model; 0 for what it began with.
        round: its newest; None before the first.
        file: its task file, relative to the home or absolute.
        problem: why it is not served, or not as its file says; None: it is.
    """

    name: str | None
    state: str
    method: str | None
    generation: int
    version: int
    round: int | None
    file: str
    problem: str | None

    @classmethod
    def read(cls, store: Store, row: TaskRow) -> TaskSummary:
        """Of its row."""
        task = store.task(row.number)
        latest = task.rounds.latest()
        label = task.facts.label
        state = "waits to be replaced" if row.request is not None else row.state
        return cls(
            row.name,
            state if label is not None else "not served yet",
            None if label is None else label.partition(" ")[2],
            task.facts.generation,
            task.checkpoints.version(),
            latest[0].round if latest else None,
            row.file,
            row.problem,
        )


def files_not_added(home: AggregatorHome, store: Store) -> list[str]:
    """The names of task files in the home that are no task's."""
    names = {row.name for row in store.tasks.all()}
    return [path.stem for path in sorted(home.task_files.glob("*.toml")) if path.stem not in names]


def shown_file(home: AggregatorHome, store: Store, name: str, version: int | None) -> str:
    """A task's file as it is served; with ``version`` that under which it was made, without the
    fleet's tables. Raises AggregatorError."""
    row = task_to_change(store, name)
    versions = store.task(row.number).versions
    if version is None:
        return file_path(home, row).read_text("utf-8") if row.served is None else row.served
    if versions.find(version) is None:
        known = ", ".join(str(each.version) for each in versions.all()[:_MOST_NAMED]) or "none yet"
        raise AggregatorError(f"task {row.name} has no version {version}; the newest are {known}")
    return file_of(home, store, row, version)


def file_of(home: AggregatorHome, store: Store, row: TaskRow, version: int) -> str:
    """The task file that a version's model was made under, without the fleet's tables, which are
    those of now: with what its paths are relative to. Raises AggregatorError."""
    served = store.task(row.number).facts.file_of(version) or row.served
    if served is None:
        raise AggregatorError(f"task {row.name} was never served: see {file_path(home, row)}")
    return put_in(without_fleet(served), file_path(home, row))


def file_path(home: AggregatorHome, row: TaskRow) -> Path:
    """Where a task's file is."""
    return home.folder / row.file


# What serve does when it is asked to, and waiting for that.


@dataclass(frozen=True, slots=True)
class TaskChange:
    """What ``serve`` was asked to do with a task: at once, where it runs.

    Attributes:
        said: what is so when it is done, in words.
        later: when that is, in words, where it is not at once: nobody need wait for it.
        notes: what else there is to know.
    """

    task: str
    said: str
    later: str | None = None
    notes: tuple[str, ...] = ()
    number: int = field(kw_only=True)
    is_done: Callable[[TaskRow], bool] = field(kw_only=True, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Waited:
    """What came of waiting: whether it is done, and what is wrong with the task nevertheless."""

    is_done: bool
    problem: str | None = None


def wait_for(home: AggregatorHome, store: Store, asked: TaskChange, seconds: float) -> Waited:
    """Wait until a running ``serve`` has done it, for so long at most, and not where none runs.
    Raises AggregatorError where it could not."""
    until = time.monotonic() + seconds
    while is_served(home) or store.lease.is_held():
        row = store.tasks.find(asked.number)
        if asked.is_done(row):
            return Waited(True, row.problem)
        if row.problem is not None and row.unwritten is None:  # else it is on its way
            raise AggregatorError(f"task {row.name}: {row.problem}")
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    return Waited(False)


# What changes them.


def add(
    home: AggregatorHome,
    store: Store,
    name: str,
    now: float,
    *,
    file: Path | None,
    text: str | None,
    step_seconds: float,
) -> TaskChange:
    """Another task: of ``file``, of ``text``, or of the home's ``tasks/NAME.toml``. Raises
    AggregatorError."""
    try:
        require_name("task", name)
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    first = read_task(file_path(home, store.tasks.find(FIRST)))
    _require_new(store, first.name, name)
    path = home.task_files / f"{name}.toml"
    text = taken_in(file or path) if text is None else put_in(text, path)
    task = parse_task(text, path, first.fleet)
    buildable(store, task)
    require_harmless_task(task, step_seconds)
    with store.database.transaction():
        known = _require_new(store, first.name, name)  # somebody else may have added it meanwhile
        number = store.tasks.add(name, str(path.relative_to(home.folder)), text)
        facts = store.task(number).facts
        if known is not None:
            # Devices have seen rounds of the one before.
            facts.own_generation = max(int(now), facts.generation + 1)
    write_task_files(home.folder, store)
    said = f"task {name} is served"
    return TaskChange(name, said, number=number, is_done=lambda row: row.served is not None)


def _require_new(store: Store, first: str, name: str) -> TaskRow | None:
    """The retired task of this name, if there was one. Raises AggregatorError where it is taken."""
    known = store.tasks.named(name)
    if name == first or (known is not None and known.state != "retired"):
        raise AggregatorError(f"there is a task {name!r} already: task replace or task retire")
    require_room(len(store.tasks.all()))
    return known


@dataclass(frozen=True, slots=True)
class PauseChange:
    """A task that opens no further round, or does again. ``before``: it was so already; ``round``:
    the open one of a paused task, which ends as usual."""

    task: str
    paused: bool
    before: bool
    round: int | None = None

    @property
    def said(self) -> str:
        """In words."""
        known = "is paused already: it " if self.paused else "is not paused: it "
        rounds = "opens no further round" if self.paused else "opens rounds"
        ends = "" if self.round is None else f"; round {self.round} ends as usual"
        return f"task {self.task} {known * self.before}{rounds}{ends}"


def pause(store: Store, name: str) -> PauseChange:
    """No further round opens."""
    with store.database.transaction():
        row = task_to_change(store, name)
        store.tasks.change(row.number, state="paused")
    latest = store.task(row.number).rounds.latest()
    ends = latest[0].round if latest and latest[0].unfinished else None
    return PauseChange(name, True, row.state == "paused", ends)


def resume(store: Store, name: str) -> PauseChange:
    """Rounds open again."""
    with store.database.transaction():
        row = task_to_change(store, name)
        store.tasks.change(row.number, state="active")
    return PauseChange(name, False, row.state == "active")


def retire(store: Store, name: str) -> TaskChange:
    """End a task for good. Raises AggregatorError."""
    with store.database.transaction():
        row = task_to_change(store, name)
        if row.number == FIRST:
            raise AggregatorError(
                f"{row.file} has the fleet's tables: its task can be paused or replaced, not "
                "retired"
            )
        store.tasks.change(row.number, state="retiring", problem=None)
    said = f"task {name} is retired; its file {row.file} stays"
    return TaskChange(name, said, number=row.number, is_done=lambda row: row.state == "retired")


def replace_task(
    home: AggregatorHome,
    store: Store,
    name: str,
    *,
    file: Path | None,
    text: str | None,
    warm_start: str | None,
    now: bool,
    step_seconds: float,
) -> TaskChange:
    """Have a task replaced by what ``file`` says, or ``text``. Raises AggregatorError."""
    row = task_to_change(store, name)
    if file is None and text is None:
        raise AggregatorError("task replace needs --from FILE: what the task is to be")
    names, new = successor(home, store, row, file or file_path(home, row), text)
    warm_start = found_from_anywhere(warm_start)
    planned = plan(store.task(row.number), names, new, warm_start)
    require_harmless_task(new, step_seconds)
    notes = []
    if planned.inherits is not None and planned.inherits.anew:
        notes.append(begins_anew(planned.inherits))
    if not planned.same_model:
        notes.append(
            "versions of the model so far are compared with no later one, and are dropped as new "
            f"ones come: models --task {row.name} --pin N keeps one"
        )
    return _ask(home, store, row, ReplaceRequest(new.text, warm_start, now), notes)


def go_back(home: AggregatorHome, store: Store, number: int, version: int) -> TaskChange:
    """Have an older version's model become a task's next version. Raises AggregatorError."""
    own = store.task(number)
    # What serve does at the same time comes before all of this, or after it.
    with store.database.transaction():
        row = store.tasks.find(number)
        own.versions.named(str(version), None)
        if row.request is not None:
            raise AggregatorError(f"task {row.name} waits to be replaced: go back after that")
        fits = version >= own.facts.judged_from or not misfit(
            own, served_task_of(home, store, row), version
        )
        if fits:
            own.versions.ask_for(version)
    if not fits:
        return _go_back_with_its_file(home, store, row, version)
    said = f"version {version}'s model becomes the next version of task {row.name}"
    later = f"{said} when serve is between two rounds"
    done = own.versions.awaited
    return TaskChange(str(row.name), said, later, number=number, is_done=lambda row: done() is None)


def _go_back_with_its_file(
    home: AggregatorHome, store: Store, row: TaskRow, version: int
) -> TaskChange:
    """Have the task replaced by its file of a version of another model, beginning with that."""
    own = store.task(row.number)
    try:
        text = file_of(home, store, row, version)
        names, new = successor(home, store, row, file_path(home, row), text)
        plan(own, names, new, str(version))
        if why := other_frozen(own, new, version):
            raise AggregatorError(why)
        require_harmless_task(new, STEP_SECONDS)
    except (AggregatorError, ArtifactError) as error:
        raise AggregatorError(
            f"version {version} is of a model that task {row.name} had before, and the task file "
            f"of then (task show {row.name} --version {version}) cannot be served: {error}"
        ) from None
    note = (
        f"version {version} is of a model that task {row.name} had before version "
        f"{own.facts.judged_from}: the task file of that time is used again with it"
    )
    return _ask(home, store, row, ReplaceRequest(new.text, str(version), back_to=version), [note])


def _ask(
    home: AggregatorHome, store: Store, row: TaskRow, request: ReplaceRequest, notes: list[str]
) -> TaskChange:
    request = replace(request, file=file_digest(file_path(home, row)))
    own = store.task(row.number)
    with store.database.transaction():
        task_to_change(store, str(row.name))  # somebody else may have retired it meanwhile
        if request.back_to is not None:
            own.versions.ask_for(None)  # what was asked for last counts
        store.tasks.change(row.number, request=request.write(), problem=None)
    latest = own.rounds.latest()
    later = None
    # A round that rests, with nobody in it, need not end first.
    if latest and latest[0].unfinished and latest[0].threshold and not request.now:
        how = " (or with --now)" if request.back_to is None else ""
        later = f"task {row.name} is replaced when round {latest[0].round} has ended{how}"
    return TaskChange(
        str(row.name),
        f"task {row.name} is replaced",
        later,
        tuple(notes),
        number=row.number,
        is_done=lambda row: row.is_replaced_by(request.text),
    )


def successor(
    home: AggregatorHome, store: Store, row: TaskRow, file: Path, content: str | None = None
) -> tuple[tuple[str, str], Task]:
    """Name and cohort of a task, and what ``file`` would make of it; ``content``: what is in it,
    where that is another than now. Raises AggregatorError."""
    path, first = file_path(home, row), read_task(file_path(home, store.tasks.find(FIRST)))
    if row.served is None:
        raise AggregatorError(f"task {row.name} was never served: edit {path} instead")
    names = {"name": str(row.name), "cohort": served_cohort(row.served)}
    is_first = row.number == FIRST
    fleet = first.text if is_first else ""
    if content is None:
        text = taken_in(file, names, fleet)
    else:
        text = put_in(content, file, names, fleet)
    new = parse_task(text, path, None if is_first else first.fleet, file)
    if is_first and new.fleet != first.fleet:
        raise AggregatorError(
            f"{file}: {', '.join(f'[{each}]' for each in FLEET_TABLES)} are the fleet's, and "
            f"cannot be replaced with a task: leave them out, or let them be as in {path}; what "
            "you change there takes effect when serve is restarted"
        )
    return (names["name"], names["cohort"]), new


def found_from_anywhere(warm_start: str | None) -> str | None:
    """What was named, as ``serve`` finds it too, which runs in another folder."""
    if warm_start is None:
        return None
    file = WarmStart.read(warm_start, Path.cwd(), own=True).file
    return warm_start if file is None else str(file.resolve())


def require_harmless_task(task: Task, step_seconds: float) -> None:
    """Raises AggregatorError for an artifact that devices could not run. The one that is installed
    with them is known to them too."""
    ours = shipped_folder().resolve()
    folders = dict.fromkeys([*task.artifacts, *task.companions])
    strange = [each for each in folders if not each.resolve().is_relative_to(ours)]
    require_harmless(strange, step_seconds)
