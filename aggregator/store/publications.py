"""What was published and is still wanted: messages, and the attachments of broadcasts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.store.database import Database, Table, TaskTable
from aggregator.store.facts import TaskFacts

# What is retained on the broker, as it was sealed, to be sent again byte for byte.


class Publications(TaskTable):
    """A task's rows of the table ``publications``, in parts.

    A part is ``round``, ``contents`` (artifacts and catalogue) or ``attachment.`` and an id: what
    is replaced together. Parts are sent in the order of their names, the round last.
    """

    def __init__(self, database: Database, task: int) -> None:
        super().__init__(database, task)
        self._replaced: set[str] = set()

    def take_replaced(self) -> list[str]:
        """Topics of the parts replaced since the last call, in order of sending."""
        replaced, self._replaced = sorted(self._replaced), set()
        return [topic for part in replaced for topic in self.topics(part)]

    def replace(self, part: str, messages: Sequence[tuple[str, bytes]]) -> None:
        """The messages of a part, in order of sending; what it had before is to be cleared."""
        self._replaced.add(part)
        self._database.execute(
            "UPDATE publications SET message = NULL WHERE task = ? AND part = ?",
            (self._task, part),
        )
        self._database.execute_many(
            "INSERT OR REPLACE INTO publications VALUES (?, ?, ?, ?, ?)",
            [
                (topic, self._task, part, place, message)
                for place, (topic, message) in enumerate(messages)
            ],
        )

    def topics(self, part: str) -> list[str]:
        """Topics of a part, in order of sending."""
        query = (
            "SELECT topic FROM publications WHERE task = ? AND part = ? AND message NOT NULL "
            "ORDER BY place"
        )
        return [row[0] for row in self._database.rows(query, (self._task, part))]

    def withdraw(self) -> None:
        """All of it is to be cleared."""
        self._replaced.clear()
        self._database.execute(
            "UPDATE publications SET message = NULL WHERE task = ?", (self._task,)
        )

    def other_owner(self, topic: str) -> int | None:
        """Another task that has a message on this topic."""
        query = "SELECT task FROM publications WHERE topic = ? AND task != ? AND message NOT NULL"
        row = self._database.row(query, (topic, self._task))
        return None if row is None else int(row[0])


class Retained(Table):
    """Table ``publications``, of all tasks: messages by topic, and topics to be cleared."""

    def topics(self) -> list[str]:
        """All topics in order of sending: contents first, since a round's manifest names them."""
        query = "SELECT topic FROM publications WHERE message NOT NULL ORDER BY task, part, place"
        return [row[0] for row in self._database.rows(query)]

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


# Which attachments are sealed, under which keys: what does not change is not sealed again.


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
    """A task's one book, as a fact of the task."""

    def __init__(self, facts: TaskFacts) -> None:
        self._facts = facts

    def load(self) -> AttachmentBook | None:
        """The book; None before the first attachment."""
        if not self._facts.attachments:
            return None
        values = json.loads(self._facts.attachments)
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
        values = {"secret": book.secret.hex(), "cohorts": cohorts, "sealed": sealed}
        self._facts.attachments = json.dumps(values)
