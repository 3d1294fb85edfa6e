"""Leave-one-out data: what may be trained on and asked for, and MovieLens's published splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LeaveOneOut:
    """One held-out item a user, with the negatives it is ranked among.

    Attributes:
        items: the catalogue's size; item rows are 0 to items - 1.
        train: per user the distinct item rows to train on, in the order they came about.
        held_out: int64 [users], the item asked for.
        negatives: per user the items it is ranked among. Those that equal the held-out item are
            dropped here: a tie with itself would count as a miss.

    Raises ValueError when the parts disagree, or a held-out item is in its user's training data.
    """

    items: int
    train: tuple[Rows, ...]
    held_out: Rows
    negatives: tuple[Rows, ...]

    def __post_init__(self) -> None:
        users = len(self.held_out)
        if len(self.train) != users or len(self.negatives) != users:
            raise ValueError(
                f"{users} held-out items, but {len(self.train)} training sets and "
                f"{len(self.negatives)} sets of negatives"
            )
        cleaned = []
        for user, (rows, target, others) in enumerate(
            zip(self.train, self.held_out, self.negatives, strict=True)
        ):
            for name, part in (("training", rows), ("negative", others)):
                if len(part) and (part.min() < 0 or part.max() >= self.items):
                    raise ValueError(f"user {user} has a {name} item outside the catalogue")
            if target in rows:
                raise ValueError(f"user {user}'s held-out item {target} is in its training data")
            cleaned.append(others[others != target])
        object.__setattr__(self, "negatives", tuple(cleaned))

    @property
    def users(self) -> int:
        """The number of users."""
        return len(self.held_out)

    def of(self, user: int) -> LeaveOneOut:
        """That of one user."""
        one = slice(user, user + 1)
        return LeaveOneOut(self.items, self.train[one], self.held_out[one], self.negatives[one])


def hold_out_validation(
    train: Sequence[Rows],
    items: int,
    rng: np.random.Generator,
    *,
    latest: bool,
    negatives: int = 99,
) -> LeaveOneOut:
    """Split the training data once more, for choosing settings without a look at the test items.

    The validation item is each user's latest (its last row), or a random one where the data has no
    times. Its negatives are drawn from all items outside the user's training data, so the test item
    may be among them like any other.
    """
    kept, targets, others = [], [], []
    for rows in train:
        place = len(rows) - 1 if latest else int(rng.integers(len(rows)))
        outside = np.ones(items, dtype=np.bool_)
        outside[rows] = False
        kept.append(np.delete(rows, place))
        targets.append(rows[place])
        others.append(rng.choice(np.flatnonzero(outside), size=negatives, replace=False))
    return LeaveOneOut(items, tuple(kept), np.asarray(targets, dtype=np.int64), tuple(others))


DATA_SETS = ("ml-100k", "ml-1m")
SplitKind = Literal["test", "validation"]
_NEGATIVES = 99
# Of the validation items and their negatives: the same for every setting that is compared.
_VALIDATION_SEED = 12345


def has_times(name: str) -> bool:
    """Whether the split's training data says when: only ``ml-100k`` does here."""
    return name == "ml-100k"


def load_split(root: Path, name: str) -> LeaveOneOut:
    """Read ``ml-100k/leave_one_out`` or ``ml-1m/ncf`` (He et al. 2017) below ``root``.

    Item rows are the files' ids, from 0. Training items come in order of time where it is known,
    else in the file's. Raises FileNotFoundError with the path, ValueError for another name or for
    files that are not as published.
    """
    if name == "ml-100k":
        folder, first, users, items = root / name / "leave_one_out", 1, 943, 1682
        train_name = "ml-100k.train.rating"
    elif name == "ml-1m":
        folder, first, users, items = root / name / "ncf", 0, 6040, 3706
        train_name = "ml-1m.train.rating.reconstructed"
    else:
        raise ValueError(f"data set {name!r} is unknown; expected one of {', '.join(DATA_SETS)}")
    train = np.loadtxt(folder / train_name, dtype=np.int64)
    test = np.loadtxt(folder / f"{name}.test.rating", dtype=np.int64)
    train[:, :2] -= first
    test[:, :2] -= first
    held_out = _by_user(test, users)
    negatives = _negatives(folder / f"{name}.test.negative", first, held_out)
    if has_times(name):
        train = train[np.argsort(train[:, 3], kind="stable")]
    train = train[np.argsort(train[:, 0], kind="stable")]
    bounds = np.searchsorted(train[:, 0], np.arange(1, users))
    rows = tuple(np.ascontiguousarray(part) for part in np.split(train[:, 1], bounds))
    return LeaveOneOut(items, rows, held_out, negatives)


@cache
def load_split_of(root: Path, name: str, kind: SplitKind) -> LeaveOneOut:
    """As :func:`load_split`; for ``validation`` the training data split once more, always alike."""
    whole = load_split(root, name)
    if kind == "test":
        return whole
    rng = np.random.default_rng(_VALIDATION_SEED)
    return hold_out_validation(whole.train, whole.items, rng, latest=has_times(name))


def _by_user(test: NDArray[np.int64], users: int) -> NDArray[np.int64]:
    if sorted(test[:, 0].tolist()) != list(range(users)):
        raise ValueError(f"the test file does not name each of {users} users once")
    held_out = np.empty(users, dtype=np.int64)
    held_out[test[:, 0]] = test[:, 1]
    return held_out


def _negatives(
    path: Path, first: int, held_out: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Lines of ``(user,item)<tab>id<tab>id...``; the first 99 ids count."""
    found: dict[int, NDArray[np.int64]] = {}
    with path.open(encoding="ascii") as lines:
        for line in lines:
            key, *ids = line.split()
            user, item = (int(number) - first for number in key.strip("()").split(","))
            if held_out[user] != item:
                raise ValueError(f"{path} is about another test item of user {user}")
            found[user] = np.asarray(ids[:_NEGATIVES], dtype=np.int64) - first
    return tuple(found[user] for user in range(len(held_out)))
