"""How often what was refused, since the beginning."""

from __future__ import annotations

from collections.abc import Mapping

from aggregator.store.database import Database

__all__ = ["RefusalCounts"]


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
