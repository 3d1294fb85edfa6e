"""Single values: of the fleet, and of each task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from aggregator.errors import AggregatorError
from aggregator.store.database import Database

Value = int | float | str | bytes


class _Named(ABC):
    """Named values, each with a property of its own."""

    def _integer(self, name: str) -> int:
        value = self._get(name)
        if not isinstance(value, int):
            raise AggregatorError(f"the database lacks {name!r}; run tessera-aggregator init")
        return value

    def _text(self, name: str) -> str | None:
        value = self._get(name)
        return value if isinstance(value, str) and value else None

    @abstractmethod
    def _get(self, name: str) -> Value | None: ...

    @abstractmethod
    def _put(self, name: str, value: Value) -> None: ...


class Facts(_Named):
    """Single values that the fleet shares: table ``facts``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def generation(self) -> int:
        """Unix time of ``init`` or of the last restore from a backup; no task's is lower."""
        return self._integer("generation")

    @generation.setter
    def generation(self, unix_seconds: int) -> None:
        self._put("generation", unix_seconds)

    @property
    def root_fingerprint(self) -> bytes:
        """16 bytes that stand for the root key."""
        value = self._get("root_fingerprint")
        if not isinstance(value, bytes):
            raise AggregatorError("the database names no root key; run tessera-aggregator init")
        return value

    @root_fingerprint.setter
    def root_fingerprint(self, fingerprint: bytes) -> None:
        self._put("root_fingerprint", fingerprint)

    @property
    def seed(self) -> int:
        """What the first model is drawn from."""
        return self._integer("seed")

    @seed.setter
    def seed(self, seed: int) -> None:
        self._put("seed", seed)

    @property
    def rotation_due(self) -> bool:
        """Whether the group key must be another one from the next round on."""
        return bool(self._get("rotation_due"))

    @rotation_due.setter
    def rotation_due(self, due: bool) -> None:
        self._put("rotation_due", int(due))

    @property
    def openings(self) -> int:
        """How many rounds have opened, of all tasks: what devices and rounds are ordered by."""
        value = self._get("openings")
        return value if isinstance(value, int) else 0

    @openings.setter
    def openings(self, count: int) -> None:
        self._put("openings", count)

    @property
    def started_unix_seconds(self) -> int | None:
        """When the last life of this home began, as its presence said; None before the first."""
        value = self._get("started")
        return value if isinstance(value, int) else None

    @started_unix_seconds.setter
    def started_unix_seconds(self, unix_seconds: int) -> None:
        self._put("started", unix_seconds)

    @property
    def served_seconds(self) -> float:
        """How long ``serve`` has run in this home, in all: a clock that no calendar can turn."""
        value = self._get("served_seconds")
        return value if isinstance(value, float) else 0.0

    @served_seconds.setter
    def served_seconds(self, seconds: float) -> None:
        self._put("served_seconds", float(seconds))

    def _get(self, name: str) -> Value | None:
        row = self._database.row("SELECT value FROM facts WHERE name = ?", (name,))
        return None if row is None else row[0]

    def _put(self, name: str, value: Value) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


class TaskFacts(_Named):
    """Single values of one task: its rows of the table ``task_facts``."""

    def __init__(self, database: Database, task: int, fleet: Facts) -> None:
        self._database = database
        self._task = task
        self._fleet = fleet

    @property
    def generation(self) -> int:
        """Unix time of when the task was made or replaced, or of the fleet's last restore."""
        value = self._get("generation")
        return max(self._fleet.generation, value if isinstance(value, int) else 0)

    @generation.setter
    def generation(self, unix_seconds: int) -> None:
        self._put("generation", unix_seconds)

    @property
    def label(self) -> str | None:
        """The task and method that the stored state belongs to; None before the first ``serve``."""
        return self._text("task")

    @label.setter
    def label(self, name: str) -> None:
        self._put("task", name)

    @property
    def catalogue(self) -> bytes | None:
        """The catalogue's content as last used."""
        value = self._get("catalogue")
        return value if isinstance(value, bytes) and value else None

    @catalogue.setter
    def catalogue(self, content: bytes | None) -> None:
        self._put("catalogue", content or b"")

    @property
    def sealed_contents(self) -> str:
        """Which contents are published, under which epoch; empty before the first publication."""
        return self._text("sealed_contents") or ""

    @sealed_contents.setter
    def sealed_contents(self, label: str) -> None:
        self._put("sealed_contents", label)

    @property
    def key_epoch(self) -> int | None:
        """The epoch of the group key that it is published under; None where that is not known."""
        value = self._get("key_epoch")
        return value if isinstance(value, int) else None

    @key_epoch.setter
    def key_epoch(self, epoch: int) -> None:
        self._put("key_epoch", epoch)

    @property
    def attachments(self) -> str | None:
        """See :class:`~aggregator.store.publications.AttachmentBooks`."""
        return self._text("attachments")

    @attachments.setter
    def attachments(self, text: str) -> None:
        self._put("attachments", text)

    @property
    def unpublished(self) -> str | None:
        """Why the next round could not be published, so that none opens before the operator looked;
        None: nothing stands in its way."""
        return self._text("unpublished")

    @unpublished.setter
    def unpublished(self, why: str | None) -> None:
        self._put("unpublished", why or "")

    def clear(self, *, but_generation: bool = False) -> None:
        """Forget all of them."""
        kept = "generation" if but_generation else ""
        self._database.execute(
            "DELETE FROM task_facts WHERE task = ? AND name != ?", (self._task, kept)
        )

    def _get(self, name: str) -> Value | None:
        query = "SELECT value FROM task_facts WHERE task = ? AND name = ?"
        row = self._database.row(query, (self._task, name))
        return None if row is None else row[0]

    def _put(self, name: str, value: Value) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO task_facts VALUES (?, ?, ?)", (self._task, name, value)
        )


# How often what was refused, since the beginning.


class RefusalCounts:
    """Table ``refusals``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to the counters."""
        self._database.execute_many(
            "INSERT INTO refusals VALUES (?, ?) "
            "ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count",
            counts.items(),
        )

    def all(self) -> dict[str, int]:
        """Counters by reason."""
        return dict(self._database.rows("SELECT reason, count FROM refusals ORDER BY reason"))
