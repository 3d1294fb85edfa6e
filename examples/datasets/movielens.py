"""MovieLens 100K in the format that GroupLens ships, and a leave-one-out split.

F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM
TiiS 5, 4, article 19. The data are for research; GroupLens forbids passing them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import default_data_folder
from device_sdk.interactions import Interactions, oldest_first
from device_sdk.tables.text import TableError, open_table

Rows = NDArray[np.int64]
_TASTES = 64


class DatasetError(Exception):
    """A data set is missing or malformed; the message says where it was looked for."""


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings as rows in the file's order: `user`, `item` int64 [n]; `timestamp` int64 [n].

    `titles[row]` names an item; `synthetic` data were drawn, not observed.
    """

    name: str
    user: Rows
    item: Rows
    timestamp: Rows
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    titles: tuple[str, ...]
    synthetic: bool = False

    def __post_init__(self) -> None:
        columns = [self.user, self.item, self.timestamp]
        if len({len(column) for column in columns}) != 1 or len(self.user) == 0:
            raise DatasetError(f"{self.name}: columns of lengths {[len(c) for c in columns]}")
        if len(self.titles) != len(self.item_ids):
            raise DatasetError(
                f"{self.name}: {len(self.titles)} titles for {len(self.item_ids)} items"
            )

    def interactions(self) -> Interactions:
        """All of them, as implicit feedback, each user's oldest first."""
        times = self.timestamp.astype(np.float64)
        order = oldest_first(self.user, self.item, times, self.user_ids, self.item_ids)
        return Interactions(self.user[order], self.item[order], self.user_ids, self.item_ids)


@dataclass(frozen=True, eq=False)
class Split:
    """`train`, and per user (by row) the held-out item's row in `test_item` int64 [users]."""

    train: Interactions
    test_item: Rows


def data_root() -> Path:
    """The folder of data sets: the environment variable TESSERA_DATA, else ../shared/data."""
    return default_data_folder()


def leave_one_out(ratings: Ratings) -> Split:
    """Each user's latest interaction is held out (:func:`device_sdk.interactions.oldest_first`).

    Raises DatasetError where a user has fewer than two.
    """
    whole = ratings.interactions()
    per_user = np.bincount(whole.user, minlength=len(whole.user_ids))
    if int(per_user.min()) < 2:
        raise DatasetError(
            f"{ratings.name}: user {whole.user_ids[int(per_user.argmin())]} has "
            f"{int(per_user.min())} interactions; leaving one out needs two"
        )
    last = np.append(np.diff(whole.user) != 0, True)
    train = Interactions(whole.user[~last], whole.item[~last], whole.user_ids, whole.item_ids)
    return Split(train, whole.item[last])


def load_ml_100k(root: Path) -> Ratings:
    """MovieLens 100K from `root`/ml-100k: u.data and u.item. Raises DatasetError."""
    folder = root / "ml-100k"
    return _ratings("MovieLens 100K", _table(folder / "u.data"), dict(_films(folder / "u.item")))


def _ratings(name: str, table: Rows, films: dict[int, str]) -> Ratings:
    user_numbers, user = np.unique(table[:, 0], return_inverse=True)
    item_numbers = np.array(sorted(films), np.int64)
    item = np.searchsorted(item_numbers, table[:, 1])
    item = np.minimum(item, len(item_numbers) - 1)
    unknown = np.flatnonzero(item_numbers[item] != table[:, 1])
    if len(unknown):
        raise DatasetError(f"{name}: item {table[unknown[0], 1]} was rated but has no title")
    return Ratings(
        name=name,
        user=user.astype(np.int64).reshape(-1),
        item=item.astype(np.int64),
        timestamp=table[:, 3].copy(),
        user_ids=tuple(str(number) for number in user_numbers.tolist()),
        item_ids=tuple(str(number) for number in item_numbers.tolist()),
        titles=tuple(films[number] for number in item_numbers.tolist()),
    )


def _table(path: Path) -> Rows:
    """The file's integers [rows, 4]: user, item, rating, time."""
    try:
        table = np.array(_rows(path), dtype=np.int64)
    except ValueError:
        table = np.empty((0, 0), np.int64)
    if table.ndim != 2 or table.shape[1] != 4:
        raise DatasetError(
            f"{path} is not in GroupLens' format: expected lines of 4 integers, separated by tabs"
        )
    return table


def _films(path: Path) -> Iterator[tuple[int, str]]:
    for number, cells in enumerate(_rows(path), 1):
        if len(cells) < 2 or not cells[0].isdigit():
            raise DatasetError(f"{path}, line {number}: expected a number and a title")
        yield int(cells[0]), cells[1].strip()


def _rows(path: Path) -> list[list[str]]:
    try:
        return [row for row in open_table(path).rows() if row]
    except TableError as error:
        raise DatasetError(f"{error}; it is not in GroupLens' format") from None
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror}): set TESSERA_DATA to the folder that "
            f"holds {path.parent.name}"
        ) from None


def ml_100k_or_synthetic(
    root: Path, download_to: Path, *, download: Callable[[Path], None], rng: np.random.Generator
) -> tuple[Ratings, str]:
    """MovieLens 100K from `root`, else from `download_to`, else downloaded there, else drawn.

    Also returns one sentence about where the data came from. `download` puts the files into the
    folder it is given, or raises DatasetError.
    """
    for folder in (root, download_to):
        if (folder / "ml-100k" / "u.data").is_file():
            return load_ml_100k(folder), f"read from {folder / 'ml-100k'}"
    try:
        download(download_to)
        return load_ml_100k(download_to), f"downloaded to {download_to / 'ml-100k'}"
    except DatasetError as error:
        return draw_synthetic(rng), f"MovieLens 100K could not be had: {error}"


def draw_synthetic(
    rng: np.random.Generator, *, users: int = 480, items: int = 640, per_user: int = 70
) -> Ratings:
    """Interactions of users with tastes in 64 dimensions, of which no order of items for all tells
    much, nor a pair of items alone: what there is to learn are latent factors.

    A user takes the items of the largest appeal: that of its taste, of a mild popularity, and of
    chance. Most have about ``per_user``, some several times as many.
    """
    taste = rng.standard_normal((users, _TASTES))
    kind = rng.standard_normal((items, _TASTES)) * (6 / np.sqrt(_TASTES))
    popularity = -0.6 * np.log(np.arange(1, items + 1))
    appeal = taste @ kind.T + popularity + rng.gumbel(size=(users, items))
    drawn = rng.lognormal(np.log(per_user), 0.6, users)
    counts = np.clip(drawn.astype(np.int64), 2, max(2, items // 4))
    order = np.argsort(-appeal, axis=1)
    chosen = [rng.permutation(row[:count]) for row, count in zip(order, counts, strict=True)]
    return Ratings(
        name="SYNTHETIC DATA (not MovieLens)",
        user=np.repeat(np.arange(users), counts),
        item=np.concatenate(chosen).astype(np.int64),
        timestamp=np.concatenate([np.arange(count) for count in counts]),
        user_ids=tuple(str(n) for n in range(1, users + 1)),
        item_ids=tuple(str(n) for n in range(1, items + 1)),
        titles=tuple(f"Synthetic item {n}" for n in range(1, items + 1)),
        synthetic=True,
    )
