"""Single values that the whole store shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Generic, TypeVar, cast

from aggregator.errors import AggregatorError
from aggregator.store.database import Table

Value = TypeVar("Value")


class Fact(Generic[Value]):
    """A named value as an attribute of :class:`Facts`, read and written where it is used.

    An empty text is none. Where there is none it is ``default``; without one, reading it raises
    AggregatorError. ``name``: in the database, where it is not the attribute's.
    """

    def __init__(self, kind: type[Any], default: Any = MISSING, name: str = "") -> None:
        self._kind, self._default, self._name = kind, default, name

    def __set_name__(self, owner: type[Facts], name: str) -> None:
        self._name = self._name or name

    def __get__(self, facts: Facts, owner: type[Facts]) -> Value:
        row = facts._database.row("SELECT value FROM facts WHERE name = ?", (self._name,))
        stored = int if self._kind is bool else self._kind  # SQLite has no truth values
        if row is not None and isinstance(row[0], stored) and row[0] != "":
            return cast("Value", self._kind(row[0]))
        if self._default is MISSING:
            raise AggregatorError(f"the database lacks {self._name!r}; run tessera-aggregator init")
        return cast("Value", self._default)

    def __set__(self, facts: Facts, value: Value) -> None:
        plain = "" if value is None else self._kind(value)
        facts._database.insert("facts", self._name, plain, replace=True)


class Facts(Table):
    """Named values, each an attribute of its own."""

    generation = Fact[int](int)
    """Unix time of ``init`` or of the last restore from a backup."""
    root_fingerprint = Fact[bytes](bytes)
    """16 bytes that stand for the root key."""
    seed = Fact[int](int)
    """What the first model is drawn from."""
    task = Fact[str | None](str, None)
    """The task and method that the stored state belongs to; None before the first ``serve``."""
    catalogue = Fact[bytes | None](bytes, None)
    """The catalogue's content as last used."""
    rotation_due = Fact[bool](bool, False)
    """Whether the group key must be another one from the next round on."""
    sealed_contents = Fact[str](str, "")
    """Which contents are published, under which epoch; empty before the first publication."""
    attachments = Fact[str](str, "")
    """Which attachments are sealed, under which keys; see ``AttachmentBooks``."""
    started_unix_seconds = Fact[int | None](int, None, "started")
    """When the last life of this home began, as its presence said; None before the first."""
    served_seconds = Fact[float](float, 0.0)
    """How long ``serve`` has run in this home, in all: a clock that no calendar can turn."""
    unpublished = Fact[str | None](str, None)
    """Why the next round could not be published, so that none opens before the operator looked;
    None: nothing stands in its way."""
    stopped_at = Fact[int | None](int, None)
    """The version that early stopping ended with, once the best one was asked for; None while
    rounds go on."""


# How often what was refused, since the beginning.


class RefusalCounts(Table):
    def add(self, counts: Mapping[str, int]) -> None:
        self._database.execute_many(
            "INSERT INTO refusals VALUES (?, ?) "
            "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
            counts.items(),
        )

    def all(self) -> dict[str, int]:
        return dict(self._database.rows("SELECT reason, count FROM refusals ORDER BY reason"))
