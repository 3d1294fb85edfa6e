"""What is retained on the broker, as it was sealed, to be sent again byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.store.database import Database

__all__ = ["Publications"]


class Publications:
    """Table ``publications``: messages by topic, and topics that must be cleared.

    A part is ``round``, ``contents`` (artifacts and catalogue) or ``attachment.`` and an id: what
    is replaced together. Parts are sent in the order of their names, the round last.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._replaced: set[str] = set()

    def take_replaced(self) -> list[str]:
        """Topics of the parts replaced since the last call, in order of sending."""
        replaced, self._replaced = sorted(self._replaced), set()
        return [topic for part in replaced for topic in self.topics(part)]

    def replace(self, part: str, messages: Sequence[tuple[str, bytes]]) -> None:
        """The messages of a part, in order of sending; what it had before is to be cleared."""
        self._replaced.add(part)
        self._database.execute("UPDATE publications SET message = NULL WHERE part = ?", (part,))
        self._database.execute_many(
            "INSERT OR REPLACE INTO publications VALUES (?, ?, ?, ?)",
            [(topic, part, place, message) for place, (topic, message) in enumerate(messages)],
        )

    def topics(self, part: str | None = None) -> list[str]:
        """Topics in order of sending: contents first, since a round's manifest names them."""
        query = "SELECT topic FROM publications WHERE message NOT NULL AND part = coalesce(?, part)"
        rows = self._database.rows(f"{query} ORDER BY part, place", (part,))
        return [row[0] for row in rows]

    def message(self, topic: str) -> bytes | None:
        """The message of a topic; None when it is to be cleared, or was."""
        query = "SELECT message FROM publications WHERE topic = ?"
        row = self._database.row(query, (topic,))
        return None if row is None else row[0]

    def superseded(self) -> list[str]:
        """Topics that still hold what is out of date."""
        query = "SELECT topic FROM publications WHERE message IS NULL"
        return [row[0] for row in self._database.rows(query)]

    def cleared(self, topic: str) -> None:
        """The broker took the clearing of this topic."""
        self._database.execute(
            "DELETE FROM publications WHERE topic = ? AND message IS NULL", (topic,)
        )
