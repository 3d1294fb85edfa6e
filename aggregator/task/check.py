"""What is wrong with a task file, and what of its changes needs more than the next round."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aggregator.errors import TaskError
from aggregator.methods.method import Binding, read_binding
from aggregator.tables import TomlTable
from aggregator.task.artifacts import ArtifactContent, read_artifacts
from aggregator.task.file import FLEET_TABLES, SHIPPED_PREFIX, Task, TaskTable

NEXT_ROUND = "takes effect between two rounds, by itself"
RESTART = "takes effect when serve is restarted"
REPLACE = "needs tessera-aggregator task replace"
FIRST_VERSION = "is read when the task's first version is made, and not again"
OTHER_TASK = "is what devices know the task by: leave it, or add a task"
_ARTIFACTS = ("task.artifacts", "task.companions")
_KNOWN_BY = frozenset(("task.name", "task.cohort"))
_PATHS = ("catalogue", "artifacts", "companions")


@dataclass(frozen=True, slots=True)
class Change:
    """A key of a task file that holds something else than what is served, and what it takes.

    ``before``, ``after``: None where it is left out.
    """

    key: str
    takes: str
    before: object
    after: object


def changes(
    served: str, new: Task, fits: Callable[[Task], bool], in_use: Collection[bytes] = ()
) -> list[Change]:
    """Every key that differs from the text that is ``served`` at the same place.

    Paths are compared, and not how they are written. ``fits``: whether the stored state suits the
    task with other settings. ``in_use``: ids of what the task has published; empty for nothing yet.
    """
    values = tomllib.loads(served)
    folder = new.path.parent
    before, after = (dict(flat(_spelt(each, folder))) for each in (values, _of(new)))
    usual = {
        "task.name": {None, TaskTable().name, new.path.stem},
        "task.cohort": {None, TaskTable().cohort},
    }
    keys = [
        key
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
        and not (key in usual and {before.get(key), after.get(key)} <= usual[key])
    ]
    changed = set(_ARTIFACTS)
    if in_use:
        # At the same place there may be another artifact by now, or the same one at another.
        changed = {key for key, each in _artifacts(new) if each.artifact_id not in in_use}
        keys = sorted({*keys, *changed})
    method = new.binding.method_name
    all_fit = not any(_table(key) == method for key in keys) or fits(new)
    # What is another method's, or stands for other items or none.
    replaced = {"task.method"}
    if "task.method" in keys:
        methods = {method, str(before.get("task.method", TaskTable().method))}
        replaced |= {key for key in keys if _table(key) in methods}
    if "task.method" in keys or before.get("task.catalogue") is None:
        replaced.add("task.catalogue")

    def takes(key: str) -> str:
        if key in _KNOWN_BY:
            return OTHER_TASK
        if key == "task.warm_start":
            return FIRST_VERSION
        if key in _ARTIFACTS:
            same = key not in changed and _count(before, key) == _count(after, key)
            return NEXT_ROUND if same or not new.binding.trains_artifacts else REPLACE
        if key in replaced:
            return REPLACE
        if _table(key) in FLEET_TABLES:
            return RESTART
        if _table(key) != method or all_fit:
            return NEXT_ROUND
        alone = _with_one(new, values, key)
        return NEXT_ROUND if alone is not None and fits(replace(new, binding=alone)) else REPLACE

    return [Change(key, takes(key), before.get(key), after.get(key)) for key in keys]


def _artifacts(task: Task) -> Iterator[tuple[str, ArtifactContent]]:
    for each in read_artifacts(task):
        yield from zip(_ARTIFACTS, filter(None, (each, each.companion)), strict=False)


def _count(values: Mapping[str, Any], key: str) -> int:
    return len(values.get(key, ()))


def _of(task: Task) -> dict[str, Any]:
    return tomllib.loads(task.text)


def _table(key: str) -> str:
    return key.partition(".")[0]


def _with_one(new: Task, served: Mapping[str, Any], key: str) -> Binding[Any] | None:
    """The method as it is served, but for one key of its table; None where they do not go
    together."""
    values, source = copy.deepcopy(dict(served)), _of(new)
    *tables, last = key.split(".")
    inside = values
    for name in tables:
        inside, source = inside.setdefault(name, {}), source.get(name, {})
    if last in source:
        inside[last] = source[last]
    else:
        inside.pop(last, None)
    method = new.binding.method_name
    try:
        return read_binding(method, TomlTable(values).table(method))
    except TaskError:
        return None


def _spelt(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same with absolute paths, and with one way to list artifacts."""
    task = dict(values.get("task", {}))
    folder /= str(task.pop("folder", ""))
    if "artifact" in task:
        task["artifacts"] = [task.pop("artifact")]
    for key in _PATHS:
        if key in task:
            task[key] = (
                [_absolute(each, folder) for each in task[key]]
                if isinstance(task[key], list)
                else _absolute(task[key], folder)
            )
    return {**values, "task": task}


def _absolute(path: str, folder: Path) -> str:
    return path if path.startswith(SHIPPED_PREFIX) else str((folder / path).resolve())


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a file's tables, by dotted names."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


# A file that is taken into the home keeps what its paths are relative to, and what it leaves out of
# what a task that goes on must keep.

_HEADER = re.compile(r"(?m)^[ \t]*\[[ \t]*task[ \t]*\][ \t]*(#.*)?$")
_ANY_HEADER = re.compile(r"[ \t]*\[+[ \t]*([A-Za-z0-9_-]+)")
_FOLDER = re.compile(r"(?m)^[ \t]*folder[ \t]*=.*\n?")


def taken_in(path: Path, names: Mapping[str, str] | None = None, fleet: str = "") -> str:
    """The text of a task file as it stands in the home: with ``task.folder``.

    ``names``: ``name`` and ``cohort`` that are meant where the file has none, of a task that it is
    to replace. ``fleet``: a task file whose fleet's tables are meant where it has none.

    Raises TaskError where it cannot be read, or where something cannot be put into it.
    """
    try:
        return put_in(path.read_text(encoding="utf-8-sig"), path, names, fleet)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not TOML: {error}") from None


def put_in(text: str, path: Path, names: Mapping[str, str] | None = None, fleet: str = "") -> str:
    """As :func:`taken_in` does, of the text of the file at ``path``."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    task = values.get("task", {})
    if not isinstance(task, dict):
        raise TaskError(f"{path}: task must be a table")
    put = {"folder": str((path.parent / str(task.get("folder", "."))).resolve())}
    usual = TaskTable()
    put |= {
        key: value
        for key, value in (names or {}).items()
        if key not in task and value != getattr(usual, key)
    }
    lines = "\n".join(f"{key} = {json.dumps(put[key], ensure_ascii=False)}" for key in put)
    text = _FOLDER.sub("", text, count=1) if "folder" in task else text
    text = _HEADER.sub(lambda match: f"{match[0]}\n{lines}", text, count=1)
    missing = {
        name: table
        for name, table in tomllib.loads(fleet).items()
        if name in FLEET_TABLES and name not in values
    }
    text = text.rstrip("\n") + "\n" + _lines(fleet, missing.__contains__)
    try:
        if tomllib.loads(text) == {**values, **missing, "task": {**task, **put}}:
            return text
    except tomllib.TOMLDecodeError:
        pass
    wanted = " and ".join(f"[{name}]" for name in missing)
    raise TaskError(
        f"{path}: the settings of the task are expected under a line [task], one key a line"
        + (f"; where they are, repeat {wanted} of the present file in it" if missing else "")
    )


def without_fleet(text: str) -> str:
    """A task file without the fleet's tables, or as it is where these cannot be told apart."""
    left = _lines(text, lambda table: table not in FLEET_TABLES)
    wanted = {key: value for key, value in tomllib.loads(text).items() if key not in FLEET_TABLES}
    try:
        return left if tomllib.loads(left) == wanted else text
    except tomllib.TOMLDecodeError:
        return text


def _lines(text: str, wanted: Callable[[str], bool]) -> str:
    """The lines of the tables of a TOML file that are wanted; those before the first one are of the
    table ""."""
    lines, inside = [], wanted("")
    for line in text.splitlines(keepends=True):
        if match := _ANY_HEADER.match(line):
            inside = wanted(match[1])
        lines += [line] if inside else []
    return "".join(lines)
