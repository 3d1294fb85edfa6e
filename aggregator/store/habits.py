"""When devices' updates come in a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aggregator.store.database import TableOfTask


class Habit(NamedTuple):
    """What is known of a device's updates in a task.

    Attributes:
        seconds: after a round's opening, its longest time of late; None: no update came yet.
        missed: 0 as soon as an update came; 1, 2, 4, 8 ... after so many waits in vain since.
        lives: whether it said anything since the last of them.
    """

    seconds: float | None = None
    missed: int = 0
    lives: bool = True


class Habits(TableOfTask):
    """A task's rows of the table ``habits``."""

    def all(self) -> dict[bytes, Habit]:
        """By the device's id."""
        query = "SELECT device_id, seconds, missed, lives FROM habits WHERE task = ?"
        return {
            device_id: Habit(seconds, missed, bool(lives))
            for device_id, seconds, missed, lives in self._database.rows(query, (self._task,))
        }

    def put(self, found: Mapping[bytes, Habit]) -> None:
        """In the place of what was known of these devices; inside a transaction."""
        self._database.execute_many(
            f"INSERT INTO habits VALUES ({self._task}, ?, ?, ?, ?) "
            "ON CONFLICT (task, device_id) DO UPDATE SET seconds = excluded.seconds, "
            "missed = excluded.missed, lives = excluded.lives",
            [
                (device_id, habit.seconds, habit.missed, int(habit.lives))
                for device_id, habit in sorted(found.items())
            ],
        )

    def forget(self, device_ids: Iterable[bytes]) -> None:
        """Of these devices, which were revoked."""
        self._database.execute_many(
            "DELETE FROM habits WHERE task = ? AND device_id = ?",
            [(self._task, each) for each in device_ids],
        )


class Late(TableOfTask):
    """A task's rows of the table ``late_arrivals``: what workers heard too late for its round, and
    the coordinator has not taken yet; of each device the longest time."""

    def add(self, came: Mapping[bytes, float | None]) -> None:
        """Seconds after the round opened, by device; None: it said that there is no update."""
        with self._database.transaction(shared=True):
            self._database.execute_many(
                f"INSERT INTO late_arrivals VALUES ({self._task}, ?, ?) "
                "ON CONFLICT (task, device_id) DO UPDATE SET seconds = CASE "
                "WHEN excluded.seconds > coalesce(late_arrivals.seconds, -1) "
                "THEN excluded.seconds ELSE late_arrivals.seconds END",
                sorted(came.items()),
            )

    def take(self) -> dict[bytes, float | None]:
        """All of them, which are gone then."""
        query = "SELECT device_id, seconds FROM late_arrivals WHERE task = ?"
        found = dict(self._database.rows(query, (self._task,)))
        if found:
            with self._database.transaction():
                self._database.execute_many(
                    "DELETE FROM late_arrivals WHERE task = ? AND device_id = ?",
                    [(self._task, device_id) for device_id in sorted(found)],
                )
        return found
