"""Attachments that were fetched, by content id: one that is offered again is not fetched again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from device_sdk.home.database import Database

__all__ = ["AttachmentStore"]


class AttachmentStore:
    """Contents under the ids that signed heads gave them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, content_id: bytes, content: bytes) -> None:
        """Keep a content until it is no longer offered."""
        with self._database.transaction() as sql:
            sql.execute("INSERT OR REPLACE INTO attachment VALUES (?, ?)", (content_id, content))

    def content(self, content_id: bytes) -> bytes | None:
        """The content of an id; None where it is not here."""
        row: tuple[Any, ...] | None = self._database.row(
            "SELECT content FROM attachment WHERE id = ?", content_id
        )
        return None if row is None else bytes(row[0])

    def ids(self) -> set[bytes]:
        """All that is here."""
        return {bytes(row[0]) for row in self._database.rows("SELECT id FROM attachment")}  # type: ignore[call-overload]

    def keep_only(self, offered: Collection[bytes]) -> None:
        """Forget what is no longer offered."""
        gone = self.ids() - set(offered)
        if gone:
            with self._database.transaction() as sql:
                sql.executemany("DELETE FROM attachment WHERE id = ?", [(each,) for each in gone])
