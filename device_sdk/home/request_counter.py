"""The counter of this device's requests to the aggregator: enrolments and opens."""

from __future__ import annotations

from typing import Any

from device_sdk.home.database import Database

__all__ = ["RequestCounter"]

_LIMIT = 2**63 - 1
_STEP_DOUBLINGS = 4
_MOST_DOUBLINGS = 32


class RequestCounter:
    """Rises for as long as the home exists: the aggregator answers a counter once in its life.

    A home that came back from a backup, or has a clone, counts from too low a number, and nobody
    tells it so. So the steps grow while nothing is answered, 1, 16, 256 and up to 2^32: it passes
    in a handful of attempts what was counted by answered ones, and in about as many attempts what
    was counted by unanswered ones. Who swallows every answer would need 2^31 attempts to exhaust
    the counter.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def next(self) -> int:
        """The counter of a new request, committed. Raises ``sqlite3.Error``."""
        with self._database.transaction() as sql:
            query = "SELECT highest, unanswered FROM request_counter"
            row: tuple[Any, ...] | None = self._database.row(query)
            highest, unanswered = (0, 0) if row is None else (int(row[0]), int(row[1]))
            step = 1 << min(_STEP_DOUBLINGS * unanswered, _MOST_DOUBLINGS)
            highest = min(_LIMIT, highest + step)
            sql.execute(
                "INSERT OR REPLACE INTO request_counter VALUES (1, ?, ?)", (highest, unanswered + 1)
            )
        return highest

    def answered(self) -> None:
        """The last request was answered: the next step is 1 again. Raises ``sqlite3.Error``."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE request_counter SET unanswered = 0")
