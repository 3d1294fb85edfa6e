"""Who interacted with what: read from a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

_USER_NAMES = frozenset(
    f"{name}{end}"
    for name in ("user", "customer", "account", "visitor")
    for end in ("", "_id", "id", "_name")
) | {"uid"}
_ITEM_NAMES = frozenset(
    f"{name}{end}"
    for name in ("item", "movie", "product", "article", "track", "song", "video", "book")
    for end in ("", "_id", "id", "_name")
) | {"iid", "title", "isbn", "asin"}


class InteractionsError(ValueError):
    """A file of interactions cannot be used; the message names the line."""


@dataclass(frozen=True, eq=False)
class Interactions:
    """Distinct (user, item) pairs as rows: `user`, `item` int64 [pairs], sorted by user, then item.

    `user_ids[row]` and `item_ids[row]` are the outside names of the rows.
    """

    user: Rows
    item: Rows
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.user.shape != self.item.shape or self.user.ndim != 1:
            raise InteractionsError(
                f"user has shape {self.user.shape} and item {self.item.shape}; "
                "expected two vectors of one length"
            )
        _check_rows("user", self.user, self.user_ids)
        _check_rows("item", self.item, self.item_ids)
        keys = np.unique(self.user * max(1, len(self.item_ids)) + self.item)
        object.__setattr__(self, "user", keys // max(1, len(self.item_ids)))
        object.__setattr__(self, "item", keys % max(1, len(self.item_ids)))

    def __len__(self) -> int:
        return len(self.user)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> Interactions:
        """Number the users and items in the order in which they appear."""
        users: dict[str, int] = {}
        items: dict[str, int] = {}
        rows = [
            (users.setdefault(user, len(users)), items.setdefault(item, len(items)))
            for user, item in pairs
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1], tuple(users), tuple(items))

    def items_of(self, user: int) -> Rows:
        """The rows of the items that a user (by row) has interacted with, rising."""
        first, last = np.searchsorted(self.user, [user, user + 1])
        return self.item[first:last]

    def user_row(self, user_id: str) -> int:
        """The row of a user. Raises InteractionsError for an unknown one."""
        try:
            return self.user_ids.index(user_id)
        except ValueError:
            some = ", ".join(self.user_ids[:5])
            raise InteractionsError(
                f"user {user_id!r} is not among the {len(self.user_ids)} users (such as {some})"
            ) from None


def _check_rows(name: str, rows: Rows, ids: tuple[str, ...]) -> None:
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(ids)):
        raise InteractionsError(f"a {name} row lies outside 0 to {len(ids) - 1}")
    if len(set(ids)) != len(ids):
        raise InteractionsError(f"{name}_ids names one {name} twice")


def read_interactions(path: str | os.PathLike[str]) -> Interactions:
    """Interactions from a text file: :func:`read_pairs`, as rows. Raises as that does."""
    return Interactions.from_pairs(read_pairs(path))


def read_pairs(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Distinct pairs of user and item from a text file, in its order: one a line, and any columns
    behind them are ignored.

    Columns are separated by tabs, commas, semicolons or `::` (found from the first line) and may be
    quoted. A first line of names such as `user,item` is a header; it may place the two columns
    anywhere. Empty lines are skipped. UTF-8, else Latin-1. Raises InteractionsError naming the
    line, OSError where the file cannot be read.
    """
    data = Path(path).read_bytes()
    if b"\x00" in data:
        raise InteractionsError(f"{path} is no text file: it holds zero bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    found = list(dict.fromkeys(_pairs(text, str(path))))
    if not found:
        raise InteractionsError(f"{path} holds no interactions; expected lines such as `user,item`")
    return found


def _pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    separator = _separator(first[1], where)
    names = _cells(first[1], separator)
    columns = _header(names)
    if columns is None:
        columns = (0, 1)
        yield _pair(names, columns, first[0], where)
    for number, line in lines:
        yield _pair(_cells(line, separator), columns, number, where)


def _separator(line: str, where: str) -> str:
    for separator in ("\t", "::", ",", ";"):
        if separator in line:
            return separator
    raise InteractionsError(
        f"{where}, line 1: no columns found; expected user and item, separated by a tab, a comma, "
        "a semicolon or `::`"
    )


def _cells(line: str, separator: str) -> list[str]:
    if separator == "::":
        return [cell.strip() for cell in line.split("::")]
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=separator))]
    except csv.Error as error:
        raise InteractionsError(f"{line[:80]!r} cannot be split into columns: {error}") from None


def _header(names: Sequence[str]) -> tuple[int, int] | None:
    """The columns of user and item, or None where the line is no header."""
    plain = [name.lower().replace(" ", "_") for name in names]
    users = [column for column, name in enumerate(plain) if name in _USER_NAMES]
    items = [column for column, name in enumerate(plain) if name in _ITEM_NAMES]
    return (users[0], items[0]) if users and items else None


def _pair(
    cells: Sequence[str], columns: tuple[int, int], number: int, where: str
) -> tuple[str, str]:
    found = [cells[column] if column < len(cells) else "" for column in columns]
    if not all(found):
        raise InteractionsError(
            f"{where}, line {number}: expected a user and an item, found {list(cells)[:4]!r}"
        )
    return found[0], found[1]
