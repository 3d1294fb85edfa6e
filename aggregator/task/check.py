"""What is wrong with a task file, and what of its changes needs more than the next round."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.errors import TaskError
from aggregator.task.file import FLEET_TABLES, Task

NEXT_ROUND = "takes effect between two rounds, by itself"
RESTART = "takes effect when serve is restarted"
REPLACE = "needs tessera-aggregator task replace"
FIRST_VERSION = "is read when the task's first version is made, and not again"
OTHER_TASK = "is what devices know the task by: leave it, or add a task"
_REPLACED = frozenset(("task.method", "task.artifact", "task.artifacts", "task.companions"))
_KNOWN_BY = frozenset(("task.name", "task.cohort"))


@dataclass(frozen=True, slots=True)
class Change:
    """A key of a task file that holds something else than what is served, and what it takes."""

    key: str
    takes: str


def changes(old: Task, new: Task, fits: Callable[[], bool]) -> list[Change]:
    """Every key that differs. ``fits``: whether the stored state suits the new settings."""
    before, after = (dict(_flat(tomllib.loads(each.text))) for each in (old, new))
    keys = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    method = new.binding.method_name
    return [Change(key, _takes(key, method, fits)) for key in keys]


def _takes(key: str, method: str, fits: Callable[[], bool]) -> str:
    table = key.partition(".")[0]
    if key in _KNOWN_BY:
        return OTHER_TASK
    if key == "task.warm_start":
        return FIRST_VERSION
    if key in _REPLACED:
        return REPLACE
    if table in FLEET_TABLES:
        return RESTART
    return REPLACE if table == method and not fits() else NEXT_ROUND


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


# A file that is taken into the home keeps what its paths are relative to.

_HEADER = re.compile(r"(?m)^[ \t]*\[[ \t]*task[ \t]*\][ \t]*(#.*)?$")
_FOLDER = re.compile(r"(?m)^[ \t]*folder[ \t]*=.*$")


def taken_in(path: Path) -> str:
    """The text of a task file as it stands in the home: with ``task.folder``.

    Raises TaskError where it cannot be read, or where the key cannot be put into it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    task = values.get("task", {})
    named = task.get("folder", ".") if isinstance(task, dict) else "."
    folder = str((path.parent / str(named)).resolve())
    line = f"folder = {json.dumps(folder, ensure_ascii=False)}"
    if isinstance(task, dict) and "folder" in task:
        found = _FOLDER.sub(lambda match: line, text, count=1)
    else:
        found = _HEADER.sub(lambda match: f"{match[0]}\n{line}", text, count=1)
    expected = {**values, "task": {**task, "folder": folder}} if isinstance(task, dict) else {}
    try:
        if tomllib.loads(found) == expected:
            return found
    except tomllib.TOMLDecodeError:
        pass
    raise TaskError(
        f"{path}: the settings of the task are expected under a line [task], one key a line"
    )
