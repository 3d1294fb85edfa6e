"""Which attachments are sealed, under which keys: what does not change is not sealed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.store.database import Database

__all__ = ["AttachmentBook", "AttachmentBooks", "CohortKey", "SealedContent"]

_NAME = "attachments"


@dataclass(frozen=True)
class CohortKey:
    """A cohort's key (32 bytes), and the members and key epoch that it was drawn for."""

    key: bytes = field(repr=False)
    drawn_for: str


@dataclass(frozen=True)
class SealedContent:
    """A content's plaintext bytes, and what says under which keys it is sealed."""

    size: int
    sealed_under: str


@dataclass(frozen=True)
class AttachmentBook:
    """``secret``: 32 bytes from which content ids are derived, drawn once.

    ``cohorts`` by name, ``sealed`` by content id in hexadecimal.
    """

    secret: bytes = field(repr=False)
    cohorts: Mapping[str, CohortKey] = field(default_factory=dict)
    sealed: Mapping[str, SealedContent] = field(default_factory=dict)


class AttachmentBooks:
    """The one book, as a fact of the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> AttachmentBook | None:
        """The book; None before the first attachment."""
        row = self._database.row("SELECT value FROM facts WHERE name = ?", (_NAME,))
        if row is None:
            return None
        values = json.loads(row[0])
        cohorts = {
            name: CohortKey(bytes.fromhex(key), drawn_for)
            for name, (key, drawn_for) in values["cohorts"].items()
        }
        sealed = {name: SealedContent(*each) for name, each in values["sealed"].items()}
        return AttachmentBook(bytes.fromhex(values["secret"]), cohorts, sealed)

    def save(self, book: AttachmentBook) -> None:
        """Replace the book; inside a transaction."""
        cohorts = {name: (each.key.hex(), each.drawn_for) for name, each in book.cohorts.items()}
        sealed = {name: (each.size, each.sealed_under) for name, each in book.sealed.items()}
        text = json.dumps({"secret": book.secret.hex(), "cohorts": cohorts, "sealed": sealed})
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_NAME, text))
