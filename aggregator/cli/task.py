"""``tessera-aggregator task``: the tasks of a fleet."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from aggregator.cli.arguments import add_home, home_of, opened
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.checking import Checked, Looking, check_alone
from aggregator.operate.fleet import Fleet
from aggregator.operate.tasks import STEP_SECONDS, TaskChange
from aggregator.task.check import NEXT_ROUND
from device_sdk.system.command_line import natural
from device_sdk.system.printable import printable

DESCRIPTION = """\
One fleet may have several tasks, each with rounds, a model and settings of its own. The first one's
file is task.toml, which has the fleet's tables too ([broker], [keys], [admission], [metrics],
[console]); each further one's is tasks/NAME.toml. Devices enrol once, with the name of one.

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
        default=STEP_SECONDS,
        metavar="SECONDS",
        help="of add, check and replace: how long one step of an artifact, or the opening of its "
        f"graphs, may take, which is tried in a process of its own (default: {STEP_SECONDS:g})",
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
        return _check_alone(home, arguments)
    with opened(arguments) as fleet:
        return _ACTIONS[action](fleet, arguments)


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


def _list(fleet: Fleet, arguments: argparse.Namespace) -> int:
    seen = fleet.tasks()
    if arguments.json:
        print(json.dumps([asdict(each) for each in seen], indent=2))
        return 0
    shown = [
        {
            "task": printable(each.name or "-"),
            "state": each.state,
            "method": printable(each.method or "-"),
            "version": each.version,
            "round": "-" if each.round is None else each.round,
            "file": printable(each.file),
        }
        for each in seen
    ]
    print(tabulate(shown, headers="keys", tablefmt="plain"))
    for each in seen:
        if each.problem is not None:
            print(f"{printable(str(each.name))}: {printable(each.problem)}")
    for name in fleet.files_not_added():
        print(f"{printable(name)}: not added; tessera-aggregator task add {name}")
    return 0


def _add(fleet: Fleet, arguments: argparse.Namespace) -> int:
    name, file = arguments.name, arguments.file
    return tell(fleet, fleet.add_task(name, file, step_seconds=arguments.step_seconds))


def _pause(fleet: Fleet, arguments: argparse.Namespace) -> int:
    print(fleet.pause(arguments.name).said)
    return 0


def _resume(fleet: Fleet, arguments: argparse.Namespace) -> int:
    print(fleet.resume(arguments.name).said)
    return 0


def _retire(fleet: Fleet, arguments: argparse.Namespace) -> int:
    return tell(fleet, fleet.retire_task(arguments.name))


def _replace(fleet: Fleet, arguments: argparse.Namespace) -> int:
    asked = fleet.replace_task(
        arguments.name,
        arguments.file,
        warm_start=arguments.warm_start,
        now=arguments.now,
        step_seconds=arguments.step_seconds,
    )
    return tell(fleet, asked)


def _show(fleet: Fleet, arguments: argparse.Namespace) -> int:
    print(fleet.file_of(arguments.name, arguments.version), end="")
    return 0


def tell(fleet: Fleet, asked: TaskChange) -> int:
    """Say what was asked of ``serve``, and wait for it a moment where it is done at once."""
    for note in asked.notes:
        print(note)
    if asked.later is not None:
        print(asked.later)
        return 0
    waited = fleet.wait(asked)
    print(asked.said if waited.is_done else f"{asked.said} as soon as serve runs")
    if waited.problem is not None:
        print(printable(f"task {asked.task}: {waited.problem}"))
    return 0


def _check(fleet: Fleet, arguments: argparse.Namespace) -> int:
    file = None if arguments.name is None else Path(arguments.name)
    found = fleet.check(
        file,
        replaces=arguments.replace,
        warm_start=arguments.warm_start,
        looking=_looking(arguments),
    )
    return _told(found, arguments)


def _check_alone(home: AggregatorHome, arguments: argparse.Namespace) -> int:
    """A file by itself: all but what it would change of a task that there is."""
    if arguments.replace is not None or arguments.warm_start is not None:
        problem = (
            f"--replace and --warm-start are of a task that there is, and {home.folder} holds no "
            "fleet: --home names another folder"
        )
        return _told([{"problem": problem}], arguments)
    said = check_alone(Path(arguments.name), _looking(arguments))
    alone = f"{home.folder} holds no fleet (--home): looked at by itself"
    if "note" in said:
        said["note"] = "; ".join(filter(None, (said["note"], alone)))
    return _told([said], arguments)


def _looking(arguments: argparse.Namespace) -> Looking:
    return Looking(arguments.step_seconds, arguments.data or "")


def _told(found: Sequence[Checked], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for each in found:
            _print_checked(each)
    return 1 if any(each["problem"] is not None for each in found) else 0


def _print_checked(said: Checked) -> None:
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


def _replaced_lines(said: Checked, replacement: dict[str, Any]) -> list[str]:
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


_ACTIONS: dict[str, Callable[[Fleet, argparse.Namespace], int]] = {
    "list": _list,
    "add": _add,
    "pause": _pause,
    "resume": _resume,
    "retire": _retire,
    "check": _check,
    "replace": _replace,
    "show": _show,
}
