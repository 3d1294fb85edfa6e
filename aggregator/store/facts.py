"""Single values that the whole store shares."""

from __future__ import annotations

from collections.abc import Mapping

from aggregator.errors import AggregatorError
from aggregator.store.database import Database


class Facts:
    """Named values, each with a property of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def generation(self) -> int:
        """Unix time of ``init`` or of the last restore from a backup."""
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
    def task(self) -> str | None:
        """The task and method that the stored state belongs to; None before the first ``serve``."""
        value = self._get("task")
        return value if isinstance(value, str) else None

    @task.setter
    def task(self, name: str) -> None:
        self._put("task", name)

    @property
    def catalogue(self) -> bytes | None:
        """The catalogue's content as last used."""
        value = self._get("catalogue")
        return value if isinstance(value, bytes) else None

    @catalogue.setter
    def catalogue(self, content: bytes) -> None:
        self._put("catalogue", content)

    @property
    def rotation_due(self) -> bool:
        """Whether the group key must be another one from the next round on."""
        return bool(self._get("rotation_due"))

    @rotation_due.setter
    def rotation_due(self, due: bool) -> None:
        self._put("rotation_due", int(due))

    @property
    def sealed_contents(self) -> str:
        """Which contents are published, under which epoch; empty before the first publication."""
        value = self._get("sealed_contents")
        return value if isinstance(value, str) else ""

    @sealed_contents.setter
    def sealed_contents(self, label: str) -> None:
        self._put("sealed_contents", label)

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

    @property
    def unpublished(self) -> str | None:
        """Why the next round could not be published, so that none opens before the operator looked;
        None: nothing stands in its way."""
        value = self._get("unpublished")
        return value if isinstance(value, str) and value else None

    @unpublished.setter
    def unpublished(self, why: str | None) -> None:
        self._put("unpublished", why or "")

    def _integer(self, name: str) -> int:
        value = self._get(name)
        if not isinstance(value, int):
            raise AggregatorError(f"the database lacks {name!r}; run tessera-aggregator init")
        return value

    def _get(self, name: str) -> int | float | str | bytes | None:
        row = self._database.row("SELECT value FROM facts WHERE name = ?", (name,))
        return None if row is None else row[0]

    def _put(self, name: str, value: int | float | str | bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


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
