"""What was published and is still wanted: messages, and contents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from aggregator.store.database import Database, Table, TableOfTask
from aggregator.store.facts import Facts, PublishedContent, PublishedContents
from aggregator.store.schema import or_replace

PACKET_HEAD_BYTES = 10
"""The most that a packet has beside topic and message."""

# What is retained on the broker, as it was sealed, to be sent again byte for byte.


class Publications(TableOfTask):
    """A task's rows of the table ``publications``, in parts.

    A part is ``round``, or ``attachment.`` or ``content.`` and an id: what is replaced together.
    Parts are sent in the order of their names, the round last.
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
        self._change("publications", {"message": None}, part=part)
        self._database.execute_many(
            f"INSERT INTO publications VALUES (?, ?, ?, ?, ?) {or_replace('publications')}",
            [
                (topic, self._task, part, place, message)
                for place, (topic, message) in enumerate(messages)
            ],
        )

    def topics(self, part: str) -> list[str]:
        """Topics of a part, in order of sending."""
        query = (
            "SELECT topic FROM publications WHERE task = ? AND part = ? AND message IS NOT NULL "
            "ORDER BY place"
        )
        return [row[0] for row in self._database.rows(query, (self._task, part))]

    def withdraw(self) -> None:
        """All of it is to be cleared."""
        self._replaced.clear()
        self._change("publications", {"message": None})


class Retained(Table):
    """Table ``publications``, of all tasks: messages by topic, and topics to be cleared."""

    def topics(self) -> list[str]:
        """All topics in order of sending: contents first, since a round's manifest names them."""
        query = (
            "SELECT topic FROM publications WHERE message IS NOT NULL ORDER BY task, part, place"
        )
        return [row[0] for row in self._database.rows(query)]

    def message(self, topic: str) -> bytes | None:
        """The message of a topic; None when it is to be cleared, or was."""
        found: bytes | None = self._value("message", "publications", topic=topic)
        return found

    def largest_bytes(self) -> int:
        """Of the packets that they make, about."""
        largest = "max(length(message) + length(topic))"
        found = self._value(largest, "publications", "AND message IS NOT NULL")
        return 0 if found is None else int(found) + PACKET_HEAD_BYTES

    def superseded(self) -> list[str]:
        """Topics that still hold what is out of date."""
        query = "SELECT topic FROM publications WHERE message IS NULL"
        return [row[0] for row in self._database.rows(query)]

    def cleared(self, topics: Iterable[str]) -> None:
        """The broker took the clearing of these topics."""
        self._database.execute_many(
            "DELETE FROM publications WHERE topic = ? AND message IS NULL",
            [(topic,) for topic in topics],
        )


# Artifacts and catalogues are the fleet's: by its id a content stands at the broker once, for as
# long as any task uses it.

_FLEET = 0
"""Whose publications they are, in the place of a task's number."""
_CONTENT_PART = "content."


class Contents:
    """All of them, by content id in hexadecimal; to be changed inside a transaction."""

    def __init__(self, database: Database, facts: Facts) -> None:
        self._facts = facts
        self._publications = Publications(database, _FLEET)
        self.take_replaced = self._publications.take_replaced

    def all(self) -> dict[str, PublishedContent]:
        """What is published."""
        return dict(self._facts.contents.by_id)

    def used_by(self, task: int) -> set[bytes]:
        """Ids of what a task uses."""
        return {bytes.fromhex(name) for name, each in self.all().items() if task in each.tasks}

    def put(
        self, name: str, content: PublishedContent, messages: Sequence[tuple[str, bytes]] | None
    ) -> None:
        """``messages``: None where it is published already."""
        if messages is not None:
            self._publications.replace(_CONTENT_PART + name, messages)
        self._save({**self.all(), name: content})

    def keep(self, task: int, names: Collection[str]) -> None:
        """A task uses these alone, of those it used; what nobody uses is to be cleared."""
        kept: dict[str, PublishedContent] = {}
        for name, content in self.all().items():
            users = tuple(each for each in content.tasks if each != task or name in names)
            if users:
                kept[name] = replace(content, tasks=users)
            else:
                self._publications.replace(_CONTENT_PART + name, [])
        self._save(kept)

    def _save(self, contents: Mapping[str, PublishedContent]) -> None:
        self._facts.contents = PublishedContents(contents)
