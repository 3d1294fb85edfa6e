"""``tessera-aggregator task``: the tasks of a fleet."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of
from aggregator.errors import AggregatorError, TaskError
from aggregator.home import AggregatorHome, is_served
from aggregator.rounds.replacement import begins_anew, buildable, fits, plan
from aggregator.store import Store
from aggregator.store.tasks import FIRST, TaskRow, require_room
from aggregator.task.check import changes, require_own_contents, taken_in
from aggregator.task.file import SharedSettings, Task, parse_task, read_task
from aggregator.task.request import Request, write_task_files
from device_sdk.system.printable import printable
from device_sdk.wire.codec.message import require_name

DESCRIPTION = """\
One fleet may have several tasks, each with rounds, a model and settings of its own. The first one's
file is task.toml, which has the fleet's tables too ([broker], [keys], [admission], [metrics]); each
further one's is tasks/NAME.toml. Devices enrol once, with the name of one.

task list            what there is, and how each is doing
task add NAME        another task, from FILE or from the home's tasks/NAME.toml
task pause NAME      no further round opens; the open one ends as usual
task resume NAME     rounds open again
task retire NAME     end it for good: its publications are cleared from the broker, its model and
                     its rounds are deleted. The name may be used again
task check [FILE]    what is wrong with a task file, and what each change of it takes; without FILE,
                     of all files of the home
task replace NAME    with the artifact, method or settings of FILE; no device enrols again. The
                     open round ends first, or is given up with --now

serve takes all of it up within a quarter of a second, and what is edited in a task file between two
rounds."""

EXAMPLES = """\
examples:
  tessera-aggregator task check air.toml --home fleet
  tessera-aggregator task add air --from air.toml --home fleet
  tessera-aggregator task replace air --from wider.toml --warm-start --home fleet
"""
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="ACTION", help="see above")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="of the task; of check, the file to look at"
    )
    parser.set_defaults(spare="name")
    parser.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="of add and replace: the task file"
    )
    parser.add_argument(
        "--warm-start",
        action="store_true",
        help="of replace: begin with the parameters that fit, by name and shape",
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="of replace: give the open round up; what was counted in it is part of no version",
    )
    parser.add_argument("--json", action="store_true", help="of list: for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    action: str = arguments.action
    _refuse_options(arguments, action)
    home = home_of(arguments)
    store = home.open_store()
    try:
        return _ACTIONS[action](home, store, arguments)
    finally:
        store.database.close()


def _refuse_options(arguments: argparse.Namespace, action: str) -> None:
    meant = {
        "--from": (arguments.file is not None, ("add", "replace")),
        "--warm-start": (arguments.warm_start, ("replace",)),
        "--now": (arguments.now, ("replace",)),
        "--json": (arguments.json, ("list",)),
    }
    for option, (given, actions) in meant.items():
        if given and action not in actions:
            raise AggregatorError(f"{option} is for task {' and task '.join(actions)}")
    if arguments.name is None and action not in ("list", "check"):
        raise AggregatorError(f"task {action} needs the NAME of a task; see task list")


def _list(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    seen = [_seen(store, row) for row in store.tasks.all()]
    if arguments.json:
        print(json.dumps(seen, indent=2))
        return 0
    shown = [
        {
            "task": printable(str(each["name"] or "-")),
            "state": each["state"],
            "method": printable(str(each["method"] or "-")),
            "version": each["version"],
            "round": "-" if each["round"] is None else each["round"],
            "file": printable(str(each["file"])),
        }
        for each in seen
    ]
    print(tabulate(shown, headers="keys", tablefmt="plain"))
    for each in seen:
        if each["problem"] is not None:
            print(f"{printable(str(each['name']))}: {printable(str(each['problem']))}")
    for path in sorted(home.task_files.glob("*.toml")):
        if path.stem not in {each["name"] for each in seen}:
            print(f"{printable(path.stem)}: not added; tessera-aggregator task add {path.stem}")
    return 0


def _seen(store: Store, row: TaskRow) -> dict[str, object]:
    task = store.task(row.number)
    latest, version = task.rounds.latest(), task.checkpoints.get("version")
    label = task.facts.label
    state = "waits to be replaced" if row.request is not None else row.state
    return {
        "name": row.name,
        "state": state if label is not None else "not served yet",
        "method": None if label is None else label.partition(" ")[2],
        "generation": task.facts.generation,
        "version": 0 if version is None else version.version,
        "round": latest[0].round if latest else None,
        "file": row.file,
        "problem": row.problem,
    }


def _add(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    try:
        require_name("task", name)
    except ValueError as error:
        raise AggregatorError(str(error)) from None
    first = read_task(_file(home, store.tasks.find(FIRST)))
    _require_new(store, first.name, name)
    path = home.task_files / f"{name}.toml"
    text = taken_in(arguments.file or path)
    task = parse_task(text, path, first.fleet)
    buildable(store, task)
    others = (_readable(home, row, first.fleet) for row in store.tasks.all())
    require_own_contents(task, [each for each in others if each is not None])
    with store.database.transaction():
        known = _require_new(store, first.name, name)  # another command may have added it meanwhile
        number = store.tasks.add(name, str(path.relative_to(home.folder)), text)
        facts = store.task(number).facts
        if known is not None:
            # Devices have seen rounds of the one before.
            facts.own_generation = max(int(time.time()), facts.generation + 1)
    write_task_files(home.folder, store)
    _tell(home, store, number, lambda row: row.served is not None, f"task {name} is served")
    return 0


def _require_new(store: Store, first: str, name: str) -> TaskRow | None:
    """The retired task of this name, if there was one. Raises AggregatorError where it is taken."""
    known = store.tasks.named(name)
    if name == first or (known is not None and known.state != "retired"):
        raise AggregatorError(f"there is a task {name!r} already: task replace or task retire")
    require_room(len(store.tasks.all()))
    return known


def _pause(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    with store.database.transaction():
        row = _row(store, arguments.name)
        store.tasks.set_state(row.number, "paused")
    latest = store.task(row.number).rounds.latest()
    ends = ""
    if latest and latest[0].closed_unix_seconds is None:
        ends = f"; round {latest[0].round} ends as usual"
    print(f"task {row.name} opens no further round{ends}")
    return 0


def _resume(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    with store.database.transaction():
        row = _row(store, arguments.name)
        store.tasks.set_state(row.number, "active")
    print(f"task {row.name} opens rounds")
    return 0


def _retire(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    row = _row(store, arguments.name)
    if row.number == FIRST:
        raise AggregatorError(
            f"{row.file} has the fleet's tables: its task can be paused or replaced, not retired"
        )
    with store.database.transaction():
        store.tasks.set_state(row.number, "retiring")
        store.tasks.set_problem(row.number, None)
    _tell(
        home,
        store,
        row.number,
        lambda row: row.state == "retired",
        f"task {row.name} is retired; its file {row.file} stays",
    )
    return 0


def _replace(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    if arguments.file is None:
        raise AggregatorError("task replace needs --from FILE: what the task is to be")
    row = _row(store, arguments.name)
    path = _file(home, row)
    first = read_task(_file(home, store.tasks.find(FIRST)))
    fleet = None if row.number == FIRST else first.fleet
    text = taken_in(arguments.file)
    new = parse_task(text, path, fleet)
    if row.number == FIRST and new.fleet != first.fleet:
        raise AggregatorError(
            f"{arguments.file} is for the first task, whose file has the fleet's tables: let "
            f"[broker], [keys], [admission] and [metrics] be as in {path}"
        )
    if row.served is None:
        raise AggregatorError(f"task {row.name} was never served: edit {path} instead")
    old = parse_task(row.served, path, fleet)
    others = (_readable(home, each, first.fleet) for each in store.tasks.all() if each != row)
    require_own_contents(new, [each for each in others if each is not None])
    planned = plan(store.task(row.number), old, new, warm_start=arguments.warm_start)
    if planned.fresh:
        print(begins_anew(planned.fresh))
    if not planned.same_model:
        print(
            "versions of the model so far are compared with no later one, and are dropped as new "
            f"ones come: models --task {row.name} --pin N keeps one"
        )
    request = Request(text, arguments.warm_start, arguments.now)
    with store.database.transaction():
        _row(store, arguments.name)  # another command may have retired it meanwhile
        store.tasks.set_request(row.number, request.write())
        store.tasks.set_problem(row.number, None)
    latest = store.task(row.number).rounds.latest()
    # A round that rests, with nobody in it, need not end first.
    open_round = bool(latest and latest[0].closed_unix_seconds is None and latest[0].threshold)
    if open_round and not arguments.now:
        print(f"task {row.name} is replaced when round {latest[0].round} has ended (or with --now)")
        return 0
    _tell(
        home,
        store,
        row.number,
        lambda row: row.request is None,
        f"task {row.name} is replaced",
    )
    return 0


def _check(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    rows = store.tasks.all()
    first_path = _file(home, rows[0])
    paths: list[tuple[TaskRow | None, Path]]
    if arguments.name is None:
        paths = [(row, _file(home, row)) for row in rows]
    else:
        path = Path(arguments.name)
        named = [row for row in rows if path.resolve() == _file(home, row).resolve()]
        named += [row for row in rows if row.name == _name_in(path)]
        paths = [(named[0] if named else None, path)]
    wrong = 0
    for row, path in paths:
        try:
            _check_one(home, store, row, path, first_path)
        except AggregatorError as error:
            wrong += 1
            print(printable(str(error)))
    return 1 if wrong else 0


def _check_one(
    home: AggregatorHome, store: Store, row: TaskRow | None, path: Path, first_path: Path
) -> None:
    is_first = row is not None and row.number == FIRST
    first = read_task(path if is_first else first_path)
    fleet = None if is_first else first.fleet
    at = path if row is None else home.folder / row.file
    if row is None and (name := _name_in(path)) is not None:
        at = path.with_name(f"{name}.toml")
    task = first if is_first else parse_task(_inside(path, at), at, fleet)
    buildable(store, task)
    if row is None:
        require_room(len(store.tasks.all()))
    rows = [each for each in store.tasks.all() if row is None or each.number != row.number]
    others = (_readable(home, each, first.fleet) for each in rows)
    require_own_contents(task, [each for each in others if each is not None])
    print(f"{path}: task {task.name}, {task.binding.method_name}: right")
    if row is None or row.served is None:
        return
    served = parse_task(row.served, at, fleet)
    found = changes(served, task, lambda: fits(store.task(row.number), task))
    for each in found:
        print(f"  {each.key}  {each.takes}")
    if not found:
        print("  as it is served")


def _inside(path: Path, at: Path) -> str:
    return taken_in(path) if path.resolve().parent != at.resolve().parent else path.read_text()


def _name_in(path: Path) -> str | None:
    """The task that a file is of: its ``task.name``, or the file's own."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text).get("task", {}).get("name")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError):
        return None
    return found if isinstance(found, str) else path.stem


def _file(home: AggregatorHome, row: TaskRow) -> Path:
    return home.folder / row.file


def _row(store: Store, name: str) -> TaskRow:
    rows = {row.name: row for row in store.tasks.all()}
    if name not in rows:
        known = ", ".join(sorted(each for each in rows if each is not None))
        raise AggregatorError(f"there is no task {name!r}; there is {known or 'none served yet'}")
    if rows[name].state == "retiring":
        raise AggregatorError(f"task {name} is being retired: serve does so as soon as it runs")
    return rows[name]


def _readable(home: AggregatorHome, row: TaskRow, fleet: SharedSettings) -> Task | None:
    """A task as its file says; None where the file has something wrong, which is its own matter."""
    try:
        return read_task(_file(home, row), None if row.number == FIRST else fleet)
    except TaskError:
        return None


def _tell(
    home: AggregatorHome, store: Store, number: int, done: Callable[[TaskRow], bool], said: str
) -> None:
    """Wait until a running ``serve`` has done it. Raises AggregatorError where it could not."""
    until = time.monotonic() + _WAIT_SECONDS
    while is_served(home):
        row = store.tasks.find(number)
        if row.problem is not None:
            raise AggregatorError(f"task {row.name}: {row.problem}")
        if done(row):
            print(said)
            return
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    print(f"{said} as soon as serve runs")


_ACTIONS: dict[str, Callable[[AggregatorHome, Store, argparse.Namespace], int]] = {
    "list": _list,
    "add": _add,
    "pause": _pause,
    "resume": _resume,
    "retire": _retire,
    "check": _check,
    "replace": _replace,
}
