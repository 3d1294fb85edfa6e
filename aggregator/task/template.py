"""The task file that ``init`` writes for a method: every key with its default, to be edited."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from aggregator.methods.method import Binding
from aggregator.task.cluster import ClusterTable
from aggregator.task.evaluation import EvaluationSettings
from aggregator.task.file import (
    AdmissionSettings,
    BrokerTable,
    ConsoleSettings,
    KeySettings,
    MetricsSettings,
    ModelsSettings,
    RoundSettings,
    StoreSettings,
    TaskTable,
)
from device_sdk.fields import default_of, hints_of, is_settings, texts_of
from device_sdk.methods.registry import METHODS, load_method

_HEAD = """\
# What this fleet learns, and how. Paths are relative to this file. Lines that start with '# ' show
# defaults, lines with 'e.g.' what has none. tessera-aggregator serve checks the file and names any
# key that it does not like.
"""
_BY_PRESENCE = {
    "evaluation": "without this # devices evaluate the model; those too old for it take no part",
}
"""Tables that do something by standing there."""
_EXAMPLES: dict[str, object] = {
    "broker.proxy": "http://proxy.example:3128",
    "task.warm_start": "model.safetensors",
    "task.folder": ".",
    "broker.user": "tessera-aggregator",
    "broker.password_file": "broker-password",
    "broker.ca_file": "ca.pem",
    "broker.certificate_file": "client.pem",
    "broker.key_file": "client.key",
    "metrics.token_file": "metrics-token",
    "console.address": "127.0.0.1:8443",
    "console.certificate": "console.pem",
    "console.key": "console.key",
    "console.hosts": ["console.example"],
    "console.trusted_proxy": "127.0.0.1",
    "console.proxy_user_header": "X-Remote-User",
    "cluster.store": "postgresql://tessera@store.example/tessera",
}
_ONLY = """\
# For the devices with some labels alone: only={site="north"}, or with a list of which any will do,
# only={site=["north", "east"]}
"""
_OTHERS = """\
# Methods on the devices' own arrays (fedavg, teacher_logits, mutual, prototypes, attention) have no
# catalogue: tessera-aggregator init --method fedavg writes a file for one of them.
"""
_BPR_ALONE = """\
# For the loss "bpr" alone: least squares, the default, trains no graph.
"""
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
            text = re.sub(r"[;,]? see :\w+:`[^`]*`", "", text)
            said = re.split(r"\.(?: (?=[A-Z])|$)", text.replace("``", ""))[0]
            found |= {name: said for name in names.split(", ") if name not in found}
    return found


def task_template(method: str = "scatter") -> str:
    """The file for one method. Raises MethodError for one that is not installed."""
    kind: type[Binding[Any]] = load_method(METHODS, method, Binding)
    live: dict[str, object]
    examples: dict[str, object]
    if kind.needs_catalogue:
        live = {"task.catalogue": "items.tsv"}
        below = {"task.catalogue": _ONLY + _OTHERS, "task.artifact": _BPR_ALONE}
        examples = {"task.artifact": "shipped:mf", "evaluation.best_by": "ndcg10_all"}
        examples["evaluation.metrics"] = ["hr10_all", "ndcg10_all"]
    else:
        one = kind.one_model or kind.artifacts[-1] == 1
        key, value = ("task.artifact", "model") if one else ("task.artifacts", ["small", "large"])
        live = {"task.method": method, key: value, f"{method}.training.classes": 10}
        below = {"task.method": _ONLY}
        examples = {"evaluation.metrics": ["accuracy", "auc"]}
    shown = _Shown({**live, "broker.url": BrokerTable().url}, _EXAMPLES | examples, below)
    return _HEAD + "".join(
        line for path, each in tables_of(method).items() for line in _lines(path, each, shown)
    )


def tables_of(method: str) -> dict[str, type[Any]]:
    """The settings classes of a task file's tables, in the file's order."""
    kind: type[Binding[Any]] = load_method(METHODS, method, Binding)
    return {
        "task": TaskTable,
        "broker": BrokerTable,
        "round": RoundSettings,
        method: kind.settings_class,
        "evaluation": EvaluationSettings,
        "models": ModelsSettings,
        "store": StoreSettings,
        "keys": KeySettings,
        "admission": AdmissionSettings,
        "metrics": MetricsSettings,
        "console": ConsoleSettings,
        "cluster": ClusterTable,
    }


@dataclass(frozen=True)
class _Shown:
    """What stands in a file beside defaults, by key: values in force, examples, lines below."""

    live: Mapping[str, object]
    examples: Mapping[str, object]
    below: Mapping[str, str]


def _lines(path: str, kind: type[Any], shown: _Shown, usual: object = None) -> Iterator[str]:
    """``usual``: the settings that hold the defaults, where they are not the class's own."""
    note = _BY_PRESENCE.get(path)
    yield f"\n[{path}]\n" if note is None else "\n" + _commented(f"# [{path}]", note)
    hints, said = hints_of(kind), meanings(kind)
    # What a class adds comes before what it inherits.
    own = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
    for field in own:
        key, default = f"{path}.{field.name}", _default(field, usual)
        start, value = "# ", default
        if key in shown.live:
            start, value = "", shown.live[key]
        elif key in shown.examples:
            start, value = "# e.g. ", shown.examples[key]
        elif is_settings(hints[field.name]) or not _spelt(default):
            continue
        others = [json.dumps(each) for each in texts_of(hints[field.name]) if each != value]
        notes = [f"or {', '.join(others)}"] if others else []
        notes += [said[field.name]] if field.name in said else []
        yield _commented(f"{start}{field.name} = {json.dumps(value)}", ": ".join(notes))
        yield shown.below.get(key, "")
    for field in own:
        if is_settings(hints[field.name]):
            inside = _default(field, usual)
            usual_inside = inside if isinstance(inside, hints[field.name]) else None
            yield from _lines(f"{path}.{field.name}", hints[field.name], shown, usual_inside)


def _default(field: Field[Any], usual: object) -> object:
    return default_of(field) if usual is None else getattr(usual, field.name)


def _commented(line: str, note: str) -> str:
    column = max(_COLUMN, len(line) + 1)
    first, *more = textwrap.wrap(note, _WIDTH - column - 2) or [""]
    lines = [f"{line:{column}}# {first}" if first else line]
    lines += [f"#{'':{column}} {each}" for each in more]
    return "".join(f"{each}\n" for each in lines)


def _spelt(default: object) -> bool:
    """Whether a file can say it: it has no word for nothing."""
    return default not in (MISSING, None, ())
