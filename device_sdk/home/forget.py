"""What a local user did, taken out of the home."""

from __future__ import annotations

import numpy as np

from device_sdk.errors import UnknownUser
from device_sdk.home.home import Home

_OF_USERS = {"users": 2, "untrained_from": 1}
"""Of a learner that recommends, what has a row for each local user, in their order, and its
dimensions."""


def forget(home: Home, user: str | None, item: str | None) -> int:
    """Delete a user with all interactions and the vector, or interactions with an item, of one user
    or of all; how many interactions. In one transaction, and overwritten on the disk.

    Raises :class:`UnknownUser`.
    """
    with home.database.transaction() as sql:
        where: list[str] = []
        values: list[int | str] = []
        place = None if user is None else home.interactions.place(user)
        if user is not None:
            if place is None:
                some = ", ".join(home.interactions.some_users(5)) or "nobody yet"
                raise UnknownUser(f"nothing was recorded for the local user {user!r}; here: {some}")
            where.append("user = ?")
            values.append(place)
        if item is not None:
            where.append("item = ?")
            values.append(item)
        found = sql.execute(f"DELETE FROM interaction WHERE {' AND '.join(where)}", values).rowcount
        if place is not None and item is None:
            _close_ranks(home, place)
        _lower_untrained(home)
    home.database.erase_deleted()
    return found


def _close_ranks(home: Home, place: int) -> None:
    """Take the user out, and those behind one place up, in the tables and among the vectors."""
    with home.database.transaction() as sql:
        sql.execute("PRAGMA defer_foreign_keys = ON")
        sql.execute("DELETE FROM user WHERE place = ?", (place,))
        for (behind,) in sql.execute(
            "SELECT place FROM user WHERE place > ? ORDER BY place", (place,)
        ).fetchall():
            sql.execute("UPDATE user SET place = ? WHERE place = ?", (behind - 1, behind))
            sql.execute("UPDATE interaction SET user = ? WHERE user = ?", (behind - 1, behind))
        for task in home.models.learner_tasks():
            state = dict(home.models.learner(task) or {})
            for name, dimensions in _OF_USERS.items():
                rows = state.get(name)
                if rows is not None and rows.ndim == dimensions and place < len(rows):
                    state[name] = np.delete(rows, place, axis=0)
                    home.models.change_learner(task, state)


def _lower_untrained(home: Home) -> None:
    """What a user records next was not trained on, though it takes over the number of an item that
    was, and is forgotten."""
    for task in home.models.learner_tasks():
        state = dict(home.models.learner(task) or {})
        numbers = state.get("untrained_from")
        if numbers is not None and numbers.ndim == 1:
            following = home.interactions.next_numbers()[: len(numbers)]
            numbers[: len(following)] = np.minimum(numbers[: len(following)], following)
            home.models.change_learner(task, {**state, "untrained_from": numbers})
