"""Who interacted with what, and when: read from a file, as its publisher or its owner wrote it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from device_sdk.system.printable import printable
from device_sdk.tables.columns import Columns, interaction_columns
from device_sdk.tables.text import (
    SEPARATORS,
    UNREADABLE,
    Progress,
    Reading,
    TableError,
    TextTable,
    no_progress,
    open_table,
)
from device_sdk.tables.times import MISSING, Seconds, TimesError, said_span, seconds_of

Rows = NDArray[np.int64]


class InteractionsError(TableError):
    """Interactions cannot be used; the message names the line, or the option that decides."""


@dataclass(frozen=True, eq=False)
class Interactions:
    """Distinct (user, item) pairs as rows: `user`, `item` int64 [pairs], a user after the other,
    each one's in the order in which they are given: of a pair that is given twice, the last time.

    `user_ids[row]` and `item_ids[row]` are the outside names of the rows. `understood`: of the file
    that they were read from, in lines for people.
    """

    user: Rows
    item: Rows
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    understood: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.user.shape != self.item.shape or self.user.ndim != 1:
            raise InteractionsError(
                f"user has shape {self.user.shape} and item {self.item.shape}; "
                "expected two vectors of one length"
            )
        _check_rows("user", self.user, self.user_ids)
        _check_rows("item", self.item, self.item_ids)
        kept = _lasts(self.user * max(1, len(self.item_ids)) + self.item)
        kept = kept[np.argsort(self.user[kept], kind="stable")]
        object.__setattr__(self, "user", self.user[kept])
        object.__setattr__(self, "item", self.item[kept])

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

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The outside names of each pair, a user after the other, each one's oldest first."""
        for user, item in zip(self.user.tolist(), self.item.tolist(), strict=True):
            yield self.user_ids[user], self.item_ids[item]

    def items_of(self, user: int) -> Rows:
        """The rows of the items that a user (by row) has interacted with, oldest first."""
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


def _lasts(keys: Rows) -> Rows:
    """Where each key stands for the last time, rising."""
    found: Rows = np.unique(keys[::-1], return_index=True)[1]
    return np.sort(len(keys) - 1 - found)


def _check_rows(name: str, rows: Rows, ids: tuple[str, ...]) -> None:
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(ids)):
        raise InteractionsError(f"a {name} row lies outside 0 to {len(ids) - 1}")
    if len(set(ids)) != len(ids):
        raise InteractionsError(f"{name}_ids names one {name} twice")


def oldest_first(
    user: Rows, item: Rows, seconds: Seconds, user_ids: Sequence[str], item_ids: Sequence[str]
) -> Rows:
    """int64 [rows], in which order they come about, whatever order they are given in: by time,
    those without one first; and of a user's items of one time by the SHA-256 of user and item, a
    line feed between. Where no row has a time: as they are given.

    Files hold many a time twice, and most programs leave such rows as they stand in the file, so
    that its order decides which item of a user is the latest. By the ids themselves it would be the
    catalogue's newest item, which few know yet. A hash is for or against nobody, and lasts.
    """
    if np.isnan(seconds).all():
        return np.arange(len(seconds))
    when = np.where(np.isnan(seconds), -np.inf, seconds)
    order = np.lexsort((user, when))
    tied = (np.diff(user[order]) == 0) & (when[order][1:] == when[order][:-1])
    among = order[np.append(tied, False) | np.append(False, tied)]
    draws = np.zeros(len(seconds), dtype="S32")
    draws[among] = [
        sha256(f"{user_ids[who]}\n{item_ids[what]}".encode()).digest()
        for who, what in zip(user[among].tolist(), item[among].tolist(), strict=True)
    ]
    return np.lexsort((draws, user, when))


# From a file.


def read_interactions(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    progress: Progress = no_progress,
) -> Interactions:
    """The interactions of a text file (:func:`device_sdk.tables.text.open_table`), one a row.

    A header names the columns of user, item and time; without one the user's comes before the
    item's, and a column that holds times is the time's. Each user's come in the order of the times
    (:func:`oldest_first`), or in the file's where it has none. Users and items are numbered as they
    appear in the file.
    Rows without a user or an item, those of another number of columns than most, and repeats are
    left out, and counted in ``understood``.

    Raises InteractionsError where the file is no table, or what it means is not clear; OSError.
    """
    try:
        return _read(path, reading or Reading(), progress)
    except TableError as error:
        raise InteractionsError(str(error)) from None


def _read(path: str | os.PathLike[str], reading: Reading, progress: Progress) -> Interactions:
    table = open_table(path, reading)
    columns = interaction_columns(table, reading)
    taken = _take(table, columns, progress)
    if not len(taken.user):
        why = f": its rows are left out, {taken.left.said()}" if taken.left.rows else ""
        raise TableError(f"{table.name} holds no interactions{why}")
    seconds = _seconds(table, columns, taken.texts, len(taken.user), reading)
    order = oldest_first(taken.user, taken.item, seconds, taken.users, taken.items)
    found = Interactions(
        taken.user[order], taken.item[order], tuple(taken.users), tuple(taken.items)
    )
    return replace(found, understood=_understood(table, columns, taken, seconds, len(found)))


@dataclass(slots=True)
class _LeftOut:
    """Rows that were left out, and the line of the first, by the reason."""

    rows: dict[str, list[int]] = field(default_factory=dict)

    def note(self, why: str, line: int, count: int = 1) -> None:
        self.rows.setdefault(why, [0, line])[0] += count

    def said(self) -> str:
        """For people; empty where there are none."""
        return ", ".join(
            f"{count:,} {why}" + (f" (the first in line {line})" if line else "")
            for why, (count, line) in self.rows.items()
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a file's rows hold: rows of users and items, int64 [rows]; ids in their order; when.

    ``surplus``: how many rows had more cells than the table.
    """

    user: Rows
    item: Rows
    users: Sequence[str]
    items: Sequence[str]
    texts: Sequence[str]
    left: _LeftOut
    surplus: int


def _take(table: TextTable, columns: Columns, progress: Progress) -> _Taken:
    (user_at,), (item_at,) = columns.places["user"], columns.places["item"]
    when = columns.places["time"]
    header, width = list(columns.header), table.width
    left, users, items = _LeftOut(), dict[str, int](), dict[str, int]()
    user_rows, item_rows, texts = array("q"), array("q"), list[str]()
    room, surplus = columns.surplus(table), 0
    rows = table.rows(progress)
    if header:
        next(rows)
    for row in rows:
        if len(row) > width and room is not None:
            row = _without_surplus(row, width, room)
            surplus += 1
        if len(row) != width:
            if any(map(str.strip, row)):
                left.note(f"of another number of columns than {width}", rows.line_num)
            continue
        who, what = row[user_at].strip(), row[item_at].strip()
        if who in MISSING or what in MISSING:
            if any(map(str.strip, row)):
                left.note("without a user or an item", rows.line_num)
            continue
        if table.damaged and UNREADABLE in who + what:
            left.note("with bytes that are no UTF-8", rows.line_num)
            continue
        if header and what in header and who in header:
            cells = [cell.strip() for cell in row]
            if cells == header:
                left.note("that repeat the header", rows.line_num)
                continue
            if sorted(cells) == sorted(header):
                raise TableError(
                    f"{table.name}, line {rows.line_num}: the header again, its columns in another "
                    "order: files were put together that differ; read them one by one"
                )
        user_rows.append(users.setdefault(who, len(users)))
        item_rows.append(items.setdefault(what, len(items)))
        if when:
            texts.append(row[when[0]].strip() if len(when) == 1 else _joined(row, when))
    user, item = (np.array(each, dtype=np.int64) for each in (user_rows, item_rows))
    return _Taken(user, item, tuple(users), tuple(items), texts, left, surplus)


def _without_surplus(row: Sequence[str], width: int, room: tuple[int, int]) -> list[str]:
    """The same without what stands in some columns, where the cells too many are."""
    first, last = room
    return [*row[:first], *[""] * (last + 1 - first), *row[len(row) - (width - 1 - last) :]]


def _joined(row: Sequence[str], when: Sequence[int]) -> str:
    """A time in parts, as ISO 8601 writes it; a day and a time of day as they are."""
    if ":" in row[when[1]]:
        day, clock = (row[place].strip() for place in when)
        return f"{day} {'0' * (clock[1:2] == ':')}{clock}"
    parts = [row[place].strip().zfill(2) for place in when]
    date = "-".join([parts[0].zfill(4), *parts[1:3], *["01"][: 3 - len(parts[:3])]])
    return f"{date}T{':'.join(parts[3:])}" if len(parts) > 3 else date


def _seconds(
    table: TextTable, columns: Columns, texts: Sequence[str], rows: int, reading: Reading
) -> Seconds:
    """float64 [rows]; NaN where there is no time."""
    if not columns.places["time"]:
        return np.full(rows, np.nan)
    try:
        return seconds_of(texts, reading.time_format)
    except TimesError as error:
        raise TableError(
            f"{table.name}, the times: {error}; --time-format '%d/%m/%Y %H:%M' says how they are "
            "written, --columns time=none takes the rows in their order"
        ) from None


def _understood(
    table: TextTable, columns: Columns, taken: _Taken, seconds: Seconds, distinct: int
) -> tuple[str, ...]:
    separator = next((e for e, text in SEPARATORS.items() if text == table.separator), "")
    how = ", ".join(
        [
            "with a header" if columns.header else "no header",
            f"separated by {separator or repr(table.separator)}",
            table.encoding,
        ]
    )
    rows = len(taken.user)
    timed = int(np.count_nonzero(~np.isnan(seconds)))
    order = f"each user's in the order of {said_span(seconds)}" if timed else "no times"
    if not timed:
        order = "in the order of the file, which has no times"
    lines = [
        f"{printable(table.name)} ({how}): {columns.said(table.width)}",
        f"{rows:,} rows, {len(taken.users):,} users, {len(taken.items):,} items; {order}",
    ]
    left = taken.left
    if rows > distinct:
        left.note("that repeat a user and an item: the last counts", 0, rows - distinct)
    if tied := _users_of_two_latest(taken, seconds) if timed else 0:
        lines.append(
            f"{tied:,} users have several items at their latest time: their ids draw which is the "
            "last, whatever the order of the rows"
        )
    if timed and timed < rows:
        lines.append(f"{rows - timed:,} rows have no time, and count as the oldest")
    if taken.surplus:
        lines.append(
            f"{taken.surplus:,} rows have more than {table.width} cells, for want of quotes: the "
            "ends that are used are taken"
        )
    if left.rows:
        lines.append(f"left out: rows {left.said()}")
    return tuple(lines)


def _users_of_two_latest(taken: _Taken, seconds: Seconds) -> int:
    newest = np.full(len(taken.users), -np.inf)
    np.fmax.at(newest, taken.user, seconds)
    among = seconds == newest[taken.user]
    pairs = np.unique(taken.user[among] * len(taken.items) + taken.item[among])
    return int(np.count_nonzero(np.bincount(pairs // len(taken.items)) > 1))
