"""A task's settings by their dotted names: changed for a run, recorded, and told apart.

``--set KEY=VALUE`` puts a value into a task file's tables before they are read, as if it stood
there; what a run's record holds are the settings in force, with the defaults of what the file
leaves out.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError, TaskError
from aggregator.task.file import FLEET_TABLES, Task, TaskTable, task_of
from aggregator.task.template import tables_of
from device_sdk.artifact import read_manifest
from device_sdk.fields import hints_of, is_settings
from device_sdk.methods.registry import MethodError

Changes = Mapping[str, Any]
"""By dotted name what a setting becomes; None: it is left out of the file."""

_NO_MATTER = (*FLEET_TABLES, "models", "store")
_MOST_NAMED = 4


def read_change(said: str) -> tuple[str, Any]:
    """``KEY=VALUE``, the value as TOML has it, or a text without quotes; empty: left out.

    Raises AggregatorError.
    """
    key, equals, value = said.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise AggregatorError(f"{said!r} is no KEY=VALUE, such as round.share=0.2")
    if not value:
        return key, None
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value
    return key, found["value"] if len(found) == 1 else value


def changed_task(path: Path, changes: Changes) -> Task:
    """The task of a file with some settings changed; paths are relative to its folder, as in it.

    A change of ``task.method`` leaves out what the file says of its own method. Raises
    AggregatorError, which names what comes near for a setting that there is not.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    if changes:
        _put(values, changes)
    try:
        return task_of(values, path, text)
    except TaskError as error:
        changed = ", ".join(f"{key}={_spelt(value)}" for key, value in changes.items())
        raise TaskError(f"{path}: {error}" + (f" (with {changed})" if changed else "")) from None


def _put(values: dict[str, Any], changes: Changes) -> None:
    task = values.get("task", {})
    before = task.get("method", TaskTable().method) if isinstance(task, dict) else ""
    method = changes.get("task.method", before) or TaskTable().method
    if method != before:
        values.pop(before, None)
    known = _known(str(method))
    for key, value in changes.items():
        if key not in known:
            raise AggregatorError(_unknown(key, known))
        *tables, last = key.split(".")
        inside: Any = values
        for name in tables:
            inside = inside.setdefault(name, {}) if isinstance(inside, dict) else inside
        if not isinstance(inside, dict):
            raise AggregatorError(f"{'.'.join(tables)} is no table in the task file")
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = value


def _known(method: str) -> list[str]:
    """The dotted names of all settings that matter to a simulation of the method."""
    try:
        tables = tables_of(method)
    except MethodError as error:
        raise AggregatorError(f"task.method: {error}") from None
    kinds = {name: kind for name, kind in tables.items() if name not in _NO_MATTER}
    return [key for name, kind in kinds.items() for key in _names(name, kind)]


def _names(before: str, kind: type[Any]) -> Iterator[str]:
    for field in fields(kind):
        name, hint = f"{before}.{field.name}", hints_of(kind)[field.name]
        if is_settings(hint):
            yield from _names(name, hint)
        else:
            yield name


def _unknown(key: str, known: Sequence[str]) -> str:
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"{key} is a table of settings: name one of them, such as {inside[0]}"
    last = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += difflib.get_close_matches(key, known, _MOST_NAMED, 0.85)
    by_last = {name.rpartition(".")[2]: name for name in known}
    near += [by_last[each] for each in difflib.get_close_matches(last, by_last, _MOST_NAMED, 0.75)]
    named = list(dict.fromkeys(near))[:_MOST_NAMED]
    if named:
        return f"there is no setting {key}; did you mean {' or '.join(named)}?"
    tables = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
    return f"there is no setting {key}; settings are named TABLE.KEY, of the tables {tables}"


# What is in force.


def settings_of(task: Task) -> dict[str, Any]:
    """By dotted name every setting that decides how a simulation goes, as JSON has it. Of an
    artifact its id, of a catalogue its content's: paths say nothing of another machine's files."""
    named: dict[str, Any] = {
        "task.method": task.binding.method_name,
        "task.broadcast_codec": task.broadcast_codec,
        "task.update_codec": task.update_codec,
        "task.artifacts": [_artifact(each) for each in task.artifacts],
        "task.companions": [_artifact(each) for each in task.companions],
        "task.catalogue": None if task.catalogue is None else _content(task.catalogue),
        "task.warm_start": None if task.warm_start is None else task.warm_start.said,
    }
    tables = {"round": asdict(task.round), task.binding.method_name: asdict(task.binding.settings)}
    if task.evaluation is not None:
        tables["evaluation"] = asdict(task.evaluation)
    found: dict[str, Any] = json.loads(json.dumps(named | dict(_flat(tables)), default=str))
    return found


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _artifact(folder: Path) -> str:
    manifest = read_manifest(folder)
    return f"{manifest.name} {manifest.id[:12]}"


def _content(path: Path) -> str:
    try:
        return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return path.name  # what reads it says what is wrong


def _spelt(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
