"""Which devices a task is for: ``[task] only = {site = "north"}``, over the devices' labels."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.tables import TomlTable
from device_sdk.wire.publish.task_messages import MOST_LABELS, require_labels


@dataclass(frozen=True, slots=True)
class Selector:
    """``only``: by the label's name the values that it may have. Empty: every device."""

    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only)

    def __str__(self) -> str:
        parts = (f"{name} = {' or '.join(values)}" for name, values in sorted(self.only.items()))
        return " and ".join(parts)

    def admits(self, labels: Mapping[str, str]) -> bool:
        """Whether the task is for a device with these labels: each one named fits."""
        return all(labels.get(name) in values for name, values in self.only.items())


def read_selector(table: TomlTable) -> Selector:
    """A table of labels, each with a text or several of which any will do. Raises TaskError."""
    only = {}
    for name in table.names():
        value: Any = table.take(name)
        values = tuple(value) if isinstance(value, list) else (value,)
        if not values:
            raise table.wrong(name, value, "a text, or a list of texts of which any will do")
        for each in values:
            try:
                require_labels({name: each})
            except ValueError as error:
                raise table.error(name, f"cannot be chosen by: {error}") from None
        only[name] = values
    if len(only) > MOST_LABELS:
        raise table.error("", f"names {len(only)} labels; expected at most {MOST_LABELS}")
    return Selector(only)


def served_selector(text: str | None) -> Selector:
    """That of a task file which was read before; of every device where there is none."""
    if text is None:
        return Selector()
    return read_selector(TomlTable(tomllib.loads(text)).table("task").table("only"))
