"""The task file that ``init`` writes: every key with its default, ready to be edited."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from aggregator.methods.scatter import ScatterTable
from aggregator.task.file import (
    AdmissionSettings,
    BrokerTable,
    KeySettings,
    MetricsSettings,
    ModelsSettings,
    RoundSettings,
    StoreSettings,
    TaskTable,
)
from device_sdk.fields import default_of, hints_of, is_settings, taken_apart

_HEAD = """\
# What this fleet learns, and how. Paths are relative to this file. Lines that start with '# ' show
# defaults, lines with 'e.g.' what has none. tessera-aggregator serve checks the file and names any
# key that it does not like.
"""
_TABLES = {
    "task": TaskTable,
    "broker": BrokerTable,
    "round": RoundSettings,
    "scatter": ScatterTable,
    "models": ModelsSettings,
    "store": StoreSettings,
    "keys": KeySettings,
    "admission": AdmissionSettings,
    "metrics": MetricsSettings,
}
_LIVE = {
    "task.artifact": "shipped:mf",
    "task.catalogue": "items.tsv",
    "broker.url": BrokerTable().url,
}
_EXAMPLES: dict[str, object] = {
    "broker.proxy": "http://proxy.example:3128",
    "task.folder": ".",
    "task.warm_start": "model.safetensors",
    "models.best_by": "loss",
    "broker.user": "tessera-aggregator",
    "broker.password_file": "broker-password",
    "broker.ca_file": "ca.pem",
    "broker.certificate_file": "client.pem",
    "broker.key_file": "client.key",
}
_BELOW = {
    "task.catalogue": """\
# For the devices with some labels alone: only={site="north"}, or with a list of which any will do,
# only={site=["north", "east"]}
# Methods on the devices' own arrays (fedavg, teacher_logits, mutual, attention) have no catalogue;
# 'artifacts' lists their models' folders, smallest first. Their settings: docs/aggregator.md.
""",
}
_COLUMN = 31
_WIDTH = 100


def meanings(kind: type[Any]) -> dict[str, str]:
    """The first sentence of what each of a settings class's fields means, from its docstring."""
    found: dict[str, str] = {}
    for each in kind.__mro__:
        # Python 3.13 and later cut the indentation off themselves.
        text = inspect.cleandoc(each.__doc__ or "")
        section = re.search(r"\nAttributes:\n(.*?)(\n\n|\Z)", text, re.DOTALL)
        for block in re.split(r"\n(?= {4}\w)", "\n" + section[1])[1:] if section else []:
            names, _, text = " ".join(block.split()).partition(": ")
            said = re.split(r"\.(?: (?=[A-Z])|$)", text.replace("``", ""))[0]
            found |= {name: said for name in names.split(", ") if name not in found}
    return found


def _lines(path: str, kind: type[Any]) -> Iterator[str]:
    yield f"\n[{path}]\n"
    hints, said = hints_of(kind), meanings(kind)
    # What a class adds comes before what it inherits.
    own = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
    for field in own:
        key, default = f"{path}.{field.name}", default_of(field)
        start, value = "# ", default
        if key in _LIVE:
            start, value = "", _LIVE[key]
        elif key in _EXAMPLES:
            start, value = "# e.g. ", _EXAMPLES[key]
        elif is_settings(hints[field.name]) or not _spelt(default):
            continue
        others = [json.dumps(each) for each in taken_apart(hints[field.name])[2] if each != value]
        notes = [f"or {', '.join(others)}"] if others else []
        notes += [said[field.name]] if field.name in said else []
        yield _commented(f"{start}{field.name} = {json.dumps(value)}", ": ".join(notes))
        yield _BELOW.get(key, "")
    for field in own:
        if is_settings(hints[field.name]):
            yield from _lines(f"{path}.{field.name}", hints[field.name])


def _commented(line: str, note: str) -> str:
    column = max(_COLUMN, len(line) + 1)
    first, *more = textwrap.wrap(note, _WIDTH - column - 2) or [""]
    lines = [f"{line:{column}}# {first}" if first else line]
    lines += [f"#{'':{column}} {each}" for each in more]
    return "".join(f"{each}\n" for each in lines)


def _spelt(default: object) -> bool:
    """Whether a file can say it: it has no word for nothing."""
    return default not in (MISSING, None, ())


TASK_TEMPLATE = _HEAD + "".join(
    line for path, kind in _TABLES.items() for line in _lines(path, kind)
)
