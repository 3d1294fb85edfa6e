"""Leave-one-out data: what may be trained on, what is asked for, and among what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
