"""``tessera-aggregator task``: the tasks of a fleet."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of, opened
from aggregator.errors import AggregatorError, PacketsTooSmall
from aggregator.home import AggregatorHome, is_served
from aggregator.publish.publisher import largest_packet, packet_lines
from aggregator.rounds.model_parts import taken_for_one
from aggregator.rounds.replacement import begins_anew, buildable, fits, other_frozen, plan
from aggregator.serve.successor import find_move, where_serve_is
from aggregator.store import Store
from aggregator.store.rows import TaskRow
from aggregator.store.tasks import FIRST, require_room
from aggregator.task.artifacts import rehearsed, require_harmless
from aggregator.task.check import NEXT_ROUND, changes, put_in, taken_in, without_fleet
from aggregator.task.file import (
    FLEET_TABLES,
    Task,
    parse_task,
    read_continued_catalogue,
    read_task,
    served_cohort,
    shipped_folder,
    understood_catalogue,
)
from aggregator.task.request import ReplaceRequest, file_digest, write_task_files
from aggregator.task.warm_start import WarmStart
from device_sdk.artifact import ArtifactError, read_manifest
from device_sdk.link.broker_url import BrokerWay
from device_sdk.system.command_line import natural
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
                     of all files of the home; FILE needs no home. Of a file for a task that there
                     is, named in it or by --replace: what replace would change, keep and begin
                     anew, by tensor
task replace NAME    with the artifact, method or settings of FILE; no device enrols again. The
                     open round ends first, or is given up with --now. What FILE leaves out of the
                     fleet's tables, and of the task's name and cohort, stays as it is. The file of
                     before is kept: rollback finds it
task show NAME       its file as it is served; with --version N that under which version N was made,
                     without the fleet's tables

serve takes all of it up within a quarter of a second, and what is edited in a task file between two
rounds."""

EXAMPLES = """\
examples:
  tessera-aggregator task check air.toml --home fleet
  tessera-aggregator task add air --from air.toml --home fleet
  tessera-aggregator task check wider.toml --replace air --home fleet
  tessera-aggregator task replace air --from wider.toml --warm-start best --home fleet
"""
_MOST_NAMED = 8
_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.05
_STEP_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="ACTION", help="see above")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="of the task; of check, the file to look at"
    )
    parser.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="of add and replace: the task file"
    )
    parser.add_argument(
        "--replace",
        metavar="NAME",
        help="of check: what the file would make of this task (default: of the one that it names)",
    )
    parser.add_argument(
        "--warm-start",
        nargs="?",
        const="latest",
        metavar="MODEL",
        help="of replace, and of check: begin with the parameters that fit, by name and shape, of "
        "the task's best or latest version or one by its number, of another task's (air@best), or "
        "of a safetensors file (default: latest)",
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="of replace: give the open round up; what was counted in it is part of no version",
    )
    parser.add_argument(
        "--version",
        type=natural,
        metavar="N",
        help="of show: the file that it was made under",
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=_STEP_SECONDS,
        metavar="SECONDS",
        help="of add, check and replace: how long one step of an artifact, or the opening of its "
        f"graphs, may take, which is tried in a process of its own (default: {_STEP_SECONDS:g})",
    )
    parser.add_argument(
        "--data",
        metavar="MODULE:FUNCTION",
        help="of check: rehearse with samples of this function's first device, as of simulate "
        "(default: made-up ones)",
    )
    parser.add_argument("--json", action="store_true", help="of list and check: for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    action: str = arguments.action
    _refuse_options(arguments, action)
    home = home_of(arguments)
    if action == "check" and arguments.name is not None and not home.is_made:
        return _told([partial(_without_home, home, arguments)], arguments)
    with opened(arguments) as (home, store):
        return _ACTIONS[action](home, store, arguments)


def _refuse_options(arguments: argparse.Namespace, action: str) -> None:
    meant = {
        "--from": (arguments.file is not None, ("add", "replace")),
        "--warm-start": (arguments.warm_start is not None, ("replace", "check")),
        "--replace": (arguments.replace is not None, ("check",)),
        "--now": (arguments.now, ("replace",)),
        "--data": (arguments.data is not None, ("check",)),
        "--json": (arguments.json, ("list", "check")),
        "--version": (arguments.version is not None, ("show",)),
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
    _require_harmless(task, arguments.step_seconds)
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
        store.tasks.change(row.number, state="paused")
    latest = store.task(row.number).rounds.latest()
    ends = ""
    if latest and latest[0].unfinished:
        ends = f"; round {latest[0].round} ends as usual"
    print(f"task {row.name} opens no further round{ends}")
    return 0


def _resume(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    with store.database.transaction():
        row = _row(store, arguments.name)
        store.tasks.change(row.number, state="active")
    print(f"task {row.name} opens rounds")
    return 0


def _retire(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    row = _row(store, arguments.name)
    if row.number == FIRST:
        raise AggregatorError(
            f"{row.file} has the fleet's tables: its task can be paused or replaced, not retired"
        )
    with store.database.transaction():
        store.tasks.change(row.number, state="retiring")
        store.tasks.change(row.number, problem=None)
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
    names, new = _successor(home, store, row, arguments.file)
    warm_start = _warm_start(arguments)
    planned = plan(store.task(row.number), names, new, warm_start)
    _require_harmless(new, arguments.step_seconds)
    if planned.inherits is not None and planned.inherits.anew:
        print(begins_anew(planned.inherits))
    if not planned.same_model:
        print(
            "versions of the model so far are compared with no later one, and are dropped as new "
            f"ones come: models --task {row.name} --pin N keeps one"
        )
    _ask(home, store, row, ReplaceRequest(new.text, warm_start, arguments.now))
    return 0


def go_back(home: AggregatorHome, store: Store, row: TaskRow, version: int) -> None:
    """Ask for a task to be replaced by its file of a version of another model, beginning with that.

    Raises AggregatorError where that cannot be.
    """
    try:
        text = file_of(home, store, row, version)
        names, new = _successor(home, store, row, _file(home, row), text)
        plan(store.task(row.number), names, new, str(version))
        if why := other_frozen(store.task(row.number), new, version):
            raise AggregatorError(why)
        _require_harmless(new, _STEP_SECONDS)
    except (AggregatorError, ArtifactError) as error:
        raise AggregatorError(
            f"version {version} is of a model that task {row.name} had before, and the task file "
            f"of then (task show {row.name} --version {version}) cannot be served: {error}"
        ) from None
    print(
        f"version {version} is of a model that task {row.name} had before version "
        f"{store.task(row.number).facts.judged_from}: the task file of that time is used again "
        "with it"
    )
    _ask(home, store, row, ReplaceRequest(new.text, str(version), back_to=version))


def file_of(home: AggregatorHome, store: Store, row: TaskRow, version: int) -> str:
    """The task file that a version's model was made under, without the fleet's tables, which are
    those of now: with what its paths are relative to. Raises AggregatorError."""
    served = store.task(row.number).facts.file_of(version) or row.served
    if served is None:
        raise AggregatorError(f"task {row.name} was never served: see {_file(home, row)}")
    return put_in(without_fleet(served), _file(home, row))


def _ask(home: AggregatorHome, store: Store, row: TaskRow, request: ReplaceRequest) -> None:
    """Have the task replaced, and say when that is."""
    request = replace(request, file=file_digest(_file(home, row)))
    with store.database.transaction():
        _row(store, str(row.name))  # another command may have retired it meanwhile
        if request.back_to is not None:
            store.task(row.number).versions.ask_for(None)  # what was asked for last counts
        store.tasks.change(row.number, request=request.write())
        store.tasks.change(row.number, problem=None)
    latest = store.task(row.number).rounds.latest()
    # A round that rests, with nobody in it, need not end first.
    open_round = bool(latest and latest[0].unfinished and latest[0].threshold)
    if open_round and not request.now:
        how = " (or with --now)" if request.back_to is None else ""
        print(f"task {row.name} is replaced when round {latest[0].round} has ended{how}")
        return
    _tell(
        home,
        store,
        row.number,
        lambda row: row.is_replaced_by(request.text),
        f"task {row.name} is replaced",
    )


def _warm_start(arguments: argparse.Namespace) -> str | None:
    """What was named, as ``serve`` finds it too, which runs in another folder."""
    said: str | None = arguments.warm_start
    if said is None:
        return None
    file = WarmStart.read(said, Path.cwd(), own=True).file
    return said if file is None else str(file.resolve())


def _successor(
    home: AggregatorHome, store: Store, row: TaskRow, file: Path, content: str | None = None
) -> tuple[tuple[str, str], Task]:
    """Name and cohort of a task, and what ``file`` would make of it; ``content``: what is in it,
    where that is another than now. Raises AggregatorError."""
    path, first = _file(home, row), read_task(_file(home, store.tasks.find(FIRST)))
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
            f"{file}: [broker], [keys], [admission] and [metrics] are the fleet's, and cannot be "
            f"replaced with a task: leave them out, or let them be as in {path}; what you change "
            f"there takes effect when serve is restarted"
        )
    return (names["name"], names["cohort"]), new


def _check(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    rows = store.tasks.all()
    check = _Check(home, store, arguments, _packets(store))
    looks: list[Callable[[], dict[str, Any]]]
    if arguments.name is None:
        if arguments.replace or arguments.warm_start:
            raise AggregatorError("task check needs the FILE that the task is to be replaced by")
        looks = [partial(check.served, row) for row in rows]
    elif arguments.replace is not None:
        looks = [partial(check.successor, _row(store, arguments.replace), Path(arguments.name))]
    else:
        looks = [partial(check.named, rows, Path(arguments.name))]
    return _told(looks, arguments)


def _told(looks: Sequence[Callable[[], dict[str, Any]]], arguments: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for look in looks:
        try:
            found.append(look())
        except AggregatorError as error:
            found.append({"problem": str(error)})
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for each in found:
            _print_checked(each)
    return 1 if any(each["problem"] is not None for each in found) else 0


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


def _without_home(home: AggregatorHome, arguments: argparse.Namespace) -> dict[str, Any]:
    """A file by itself: all but what it would change of a task that there is."""
    if arguments.replace is not None or arguments.warm_start is not None:
        raise AggregatorError(
            f"--replace and --warm-start are of a task that there is, and {home.folder} holds no "
            "fleet: --home names another folder"
        )
    file = Path(arguments.name)
    said = _looked_at(file, parse_task(taken_in(file), file), arguments, _packets(None))
    alone = f"{home.folder} holds no fleet (--home): looked at by itself"
    return said | {"note": "; ".join(filter(None, (said["note"], alone)))}


@dataclass(frozen=True)
class _Check:
    """``task check`` in a home: what is found of a file, as ``--json`` prints it."""

    home: AggregatorHome
    store: Store
    arguments: argparse.Namespace
    packets: _Packets

    def named(self, rows: list[TaskRow], file: Path) -> dict[str, Any]:
        """A file of the home, or one to replace what it is named after, or a new task's."""
        name, is_first = _name_in(file)
        for row in rows:
            if file.resolve() == _file(self.home, row).resolve():
                return self.served(row)
            if (row.name == name or (is_first and row.number == FIRST)) and row.served is not None:
                return self.successor(row, file)
        if self.arguments.warm_start is not None:
            raise AggregatorError(
                "--warm-start is for a task that is replaced: name it by --replace"
            )
        first = read_task(_file(self.home, rows[0]))
        task = parse_task(taken_in(file), file.with_name(f"{name}.toml"), first.fleet, file)
        buildable(self.store, task)
        require_room(len(rows))
        return _looked_at(file, task, self.arguments, self.packets) | {
            "next": f"task add {task.name} --from {file}"
        }

    def served(self, row: TaskRow) -> dict[str, Any]:
        """A file of the home, which serve takes up as far as it can."""
        path = _file(self.home, row)
        first = read_task(_file(self.home, self.store.tasks.find(FIRST)))
        task = first if row.number == FIRST else read_task(path, first.fleet)
        stored = self.store.task(row.number)
        buildable(self.store, task)
        if task.catalogue is not None:
            read_continued_catalogue(task.catalogue, stored)
        said = _looked_at(path, task, self.arguments, self.packets)
        if row.served is None:
            return said
        found = changes(
            row.served, task, partial(fits, stored), self.store.contents.used_by(row.number)
        )
        return said | {"changes": [asdict(each) for each in found], "waits": row.problem}

    def successor(self, row: TaskRow, file: Path) -> dict[str, Any]:
        """What ``task replace`` would do with a file."""
        stored = self.store.task(row.number)
        names, new = _successor(self.home, self.store, row, file)
        planned = plan(stored, names, new, None)
        in_use = self.store.contents.used_by(row.number)
        found = changes(row.served or "", new, partial(fits, stored), in_use)
        replacement: dict[str, Any] = {
            "version": planned.method.version,
            "warm_start": _warm_start(self.arguments) or "latest",
            "problem": None,
        }
        try:
            inherits = plan(stored, names, new, replacement["warm_start"]).inherits
            assert inherits is not None
            replacement |= asdict(inherits)
        except AggregatorError as error:
            if self.arguments.warm_start is not None:
                raise  # as task replace would
            replacement["problem"] = str(error)
        return _looked_at(file, new, self.arguments, self.packets) | {
            "changes": [asdict(each) for each in found],
            "replacement": replacement,
            "next": f"task replace {row.name} --from {file}",
        }


def _require_harmless(task: Task, step_seconds: float) -> None:
    """Raises AggregatorError for an artifact that devices could not run. The one that is installed
    with them is known to them too."""
    ours = shipped_folder().resolve()
    folders = dict.fromkeys([*task.artifacts, *task.companions])
    strange = [each for each in folders if not each.resolve().is_relative_to(ours)]
    require_harmless(strange, step_seconds)


def _looked_at(
    path: Path, task: Task, arguments: argparse.Namespace, packets: _Packets
) -> dict[str, Any]:
    _require_harmless(task, arguments.step_seconds)
    shows = rehearsed(task, arguments.step_seconds, arguments.data or "")
    said = {"file": str(path), "task": task.name, "method": task.binding.method_name}
    alike = taken_for_one([read_manifest(each).name for each in task.artifacts])
    notes = [note for note in (task.note, alike) if note]
    problems = [each.problem for each in shows if each.problem is not None]
    lines = _each_line_once([each.lines for each in shows])
    sizes = Counter[str]()
    for each in shows:
        sizes |= Counter(each.sizes)
    try:
        lines += packets(task, sizes)
    except PacketsTooSmall as error:
        problems.append(str(error))
    understood = None if task.catalogue is None else understood_catalogue(task.catalogue)[1]
    return {
        **said,
        "problem": f"{path}: {problems[0]}" if problems else None,
        "note": "; ".join(notes) or None,
        "catalogue": understood,
        "rehearsal": lines,
    }


def _each_line_once(found: Sequence[Sequence[str]]) -> list[str]:
    """What was found of each artifact; what an earlier one had too is not told again."""
    lines: list[str] = []
    for told in found:
        new = [line for line in told if line not in lines]
        lines += new if len(new) == len(told) else [*new, "  else as those before"]
    return lines


def _print_checked(said: dict[str, Any]) -> None:
    if said["problem"] is not None:
        print(printable(said["problem"]))
        for line in said.get("rehearsal", ()):
            print(printable(line))
        return
    lines = [f"{said['file']}: task {said['task']}, {said['method']}: right"]
    if said["note"] is not None:
        lines.append(f"  note: {said['note']}")
    if said["catalogue"] is not None:
        lines.append(f"  catalogue: {said['catalogue']}")
    lines += [f"  {line}" for line in said.get("rehearsal", ())]
    found = said.get("changes")
    for each in found or []:
        values = " -> ".join(
            "left out" if each[key] is None else json.dumps(each[key], ensure_ascii=False)
            for key in ("before", "after")
        )
        lines.append(f"  {each['key']}  {each['takes']} ({values})")
    if found == []:
        lines.append(f"  {said.get('waits') or 'as it is served'}")
    if (replacement := said.get("replacement")) is not None:
        lines += _replaced_lines(said, replacement)
    elif "next" in said:
        lines.append(f"  as a new task: {said['next']}; in the place of another: --replace NAME")
    for line in lines:
        print(printable(line))


def _replaced_lines(said: dict[str, Any], replacement: dict[str, Any]) -> list[str]:
    if all(each["takes"] == NEXT_ROUND for each in said["changes"]):
        return ["  nothing of it needs a replacement: edit the task's own file, and it goes on"]
    lines = [
        f"as a replacement ({said['next']}):",
        "  no device enrols again; its name and cohort, its devices and their labels stay, and so",
        f"  do its versions (models, model). It begins anew as version {replacement['version']}, "
        "all settings of",
        "  the file in force, when the open round has ended, or at once with --now",
    ]
    if replacement["problem"] is not None:
        return [*lines, f"  {replacement['problem']}"]
    lines.append(f"  with --warm-start {replacement['warm_start']}:")
    for name, shape in replacement["kept"].items():
        lines.append(f"    kept     {name} {list(shape)}")
    for name, (shape, before) in replacement["anew"].items():
        was = "not in it" if before is None else f"it has {list(before)}"
        lines.append(f"    anew     {name} {list(shape)}, {was}")
    for name, shape in replacement["dropped"].items():
        lines.append(f"    dropped  {name} {list(shape)}")
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


def _tell(
    home: AggregatorHome, store: Store, number: int, done: Callable[[TaskRow], bool], said: str
) -> None:
    """Wait until a running ``serve`` has done it. Raises AggregatorError where it could not."""
    until = time.monotonic() + _WAIT_SECONDS
    while is_served(home) or store.lease.is_held():
        row = store.tasks.find(number)
        if done(row):
            print(said)
            if row.problem is not None:
                print(printable(f"task {row.name}: {row.problem}"))
            return
        if row.problem is not None and row.unwritten is None:  # else it is on its way
            raise AggregatorError(f"task {row.name}: {row.problem}")
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    print(f"{said} as soon as serve runs")


def _show(home: AggregatorHome, store: Store, arguments: argparse.Namespace) -> int:
    row = _row(store, arguments.name)
    versions = store.task(row.number).versions
    version: int | None = arguments.version
    if version is None:
        path = _file(home, row)
        print(path.read_text(encoding="utf-8") if row.served is None else row.served, end="")
        return 0
    if versions.find(version) is None:
        known = ", ".join(str(each.version) for each in versions.all()[:_MOST_NAMED]) or "none yet"
        raise AggregatorError(f"task {row.name} has no version {version}; the newest are {known}")
    print(file_of(home, store, row, version), end="")
    return 0


_ACTIONS: dict[str, Callable[[AggregatorHome, Store, argparse.Namespace], int]] = {
    "list": _list,
    "add": _add,
    "pause": _pause,
    "resume": _resume,
    "retire": _retire,
    "check": _check,
    "replace": _replace,
    "show": _show,
}
