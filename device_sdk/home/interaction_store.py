"""Who did what on this device, by the outside ids of items. It never leaves the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from device_sdk.home.database import HomeStore
from device_sdk.wire.publish.catalogue import MOST_ID_BYTES

_MOST_USER_BYTES = 256


class InteractionStore(HomeStore):
    """Distinct (user, item) pairs of each task, and those recorded without a task's name ("").

    Users are the home's: each keeps its place, in the order of their first items, in every task.
    """

    def add(self, pairs: Iterable[tuple[str, str]], task: str = "") -> int:
        """Record (user, item) pairs in one commit; how many were new. Raises ValueError.

        Items need not be in the catalogue: those that are not wait until it knows them.
        """
        checked = [
            (_text("user", user, _MOST_USER_BYTES), _text("item", item, MOST_ID_BYTES))
            for user, item in pairs
        ]
        with self._database.transaction() as sql:
            before = sql.total_changes
            places: dict[str, int] = dict(sql.execute("SELECT name, place FROM user"))
            for name in dict.fromkeys(name for name, _ in checked):
                if name not in places:
                    places[name] = len(places)
                    sql.execute("INSERT INTO user VALUES (?, ?)", (places[name], name))
                    before += 1
            newest: dict[int, int] = {}
            for user in dict.fromkeys(places[user] for user, _ in checked):
                query = "SELECT coalesce(max(number), 0) FROM interaction WHERE user = ?"
                (newest[user],) = sql.execute(query, (user,)).fetchone()
            for name, item in checked:
                user = places[name]
                newest[user] += 1
                sql.execute(
                    "INSERT OR IGNORE INTO interaction VALUES (?, ?, ?, ?)",
                    (task, user, item, newest[user]),
                )
            return sql.total_changes - before

    def place(self, user: str) -> int | None:
        """The place of a local user; None for one without interactions."""
        row = self._database.row("SELECT place FROM user WHERE name = ?", user)
        return None if row is None else int(row[0])

    def some_users(self, most: int) -> list[str]:
        """Names of the first local users, at most ``most``."""
        found = self._database.rows("SELECT name FROM user ORDER BY place LIMIT ?", most)
        return [name for (name,) in found]

    def counts(self) -> tuple[int, int]:
        """Numbers of local users and of interactions."""
        row = self._database.row(
            "SELECT (SELECT count(*) FROM user), (SELECT count(*) FROM interaction)"
        )
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def tasks(self) -> set[str]:
        """Names of the tasks that something was recorded for; "" for without a name."""
        return {name for (name,) in self._database.rows("SELECT DISTINCT task FROM interaction")}

    def items_of(self, place: int, names: Collection[str] = ("",)) -> list[str]:
        """The outside ids that a user touched, in what was recorded under ``names``."""
        found = self._database.rows(
            f"SELECT DISTINCT item FROM interaction WHERE user = ? AND task IN {_marks(names)}",
            place,
            *names,
        )
        return [item for (item,) in found]

    def recorded(self, names: Collection[str] = ("",)) -> list[str]:
        """The outside ids of the items in what was recorded under ``names``, each once."""
        query = f"SELECT DISTINCT item FROM interaction WHERE task IN {_marks(names)}"
        return [item for (item,) in self._database.rows(query, *names)]

    def positives(
        self, rows: Mapping[str, int], names: Collection[str] = ("",)
    ) -> tuple[NDArray[np.int64], ...]:
        """Per user the rising rows (by a catalogue) of the items that the catalogue knows, out of
        what was recorded under ``names``."""
        users, _ = self.counts()
        found: list[list[int]] = [[] for _ in range(users)]
        query = f"SELECT DISTINCT user, item FROM interaction WHERE task IN {_marks(names)}"
        for user, item in self._database.rows(query, *names):
            row = rows.get(item)
            if row is not None:
                found[user].append(row)
        return tuple(np.array(sorted(each), dtype=np.int64) for each in found)

    def latest(
        self, rows: Mapping[str, int], names: Collection[str] = ("",)
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per user the row of the item recorded last among those that the catalogue knows, out of
        what was recorded under ``names``, and its number, int64 [users] each; -1 for none.

        An item that is recorded again stays where it was. Of what formats before 5 held the order
        is not known: it counts as older than all else, in the order of ids.
        """
        users, _ = self.counts()
        found = np.full((2, users), -1, dtype=np.int64)
        query = (
            f"SELECT user, item, number FROM interaction WHERE task IN {_marks(names)} "
            "ORDER BY number, item"
        )
        for user, item, number in self._database.rows(query, *names):
            row = rows.get(item)
            if row is not None:
                found[:, user] = row, number
        return found[0], found[1]

    def next_numbers(self) -> NDArray[np.int64]:
        """Per user the number of the item that is recorded next, int64 [users]."""
        users, _ = self.counts()
        found = np.ones(users, dtype=np.int64)
        for user, newest in self._database.rows(
            "SELECT user, max(number) FROM interaction GROUP BY user"
        ):
            found[user] = newest + 1
        return found


def _marks(names: Collection[str]) -> str:
    return f"({', '.join('?' for _ in names)})"


def _text(what: str, value: str, most_bytes: int) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} is {value!r}; expected a text of at least one character")
    if len(value.encode()) > most_bytes:
        raise ValueError(f"the {what} {value[:40]!r}... has more than {most_bytes} bytes")
    return value
