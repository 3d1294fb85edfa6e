"""Partial-order triples (user, liked item, other item), drawn fresh for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.scatter.pool import PoolSettings
from device_sdk.methods.scatter.unliked import Unliked

__all__ = ["TripleSource", "Triples", "seen_by_anyone"]

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Triples:
    """``user``, ``positive``, ``negative``: int64 [triples]; ``weight``: float32 [triples].

    Users are local indices, items are rows of the catalogue.
    """

    user: Rows
    positive: Rows
    negative: Rows
    weight: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.user)


def seen_by_anyone(positives: Sequence[Rows], catalogue: int) -> NDArray[np.bool_]:
    """bool [catalogue]: true where any local user has interacted with the item."""
    seen = np.zeros(catalogue, dtype=np.bool_)
    for rows in positives:
        seen[rows] = True
    return seen


class TripleSource:
    """The triples of a device, whose negatives are drawn anew for each epoch.

    There is a triple for each interaction of each local user, and one for each pseudo-item. A
    negative is any item of the device's pool (or of the whole catalogue) that is outside this
    user's own *training* items. Nothing else is left out: a user's future items, those of a test
    set included, are drawn as negatives like any other.

    A pseudo-item's triple takes the negative of one of its user's true triples: each is still drawn
    uniformly, but the update names fewer rows. Only true triples then have a negative to
    themselves. That tells them apart, and so do weights as different as the default's. Where sizes
    may hide what is true (``PoolSettings.hides_sizes``), nothing is shared, and no user draws its
    own pseudo-items as negatives: a true item never comes with their sign.

    Args:
        positives: per local user, the distinct item rows of its interactions.
        pool: the device's fixed pool, from ``grow_pool``.
        seen: from ``seen_by_anyone``.
        settings: sizes and weights of the pool's parts.
    """

    def __init__(
        self,
        positives: Sequence[Rows],
        pool: Rows,
        seen: NDArray[np.bool_],
        settings: PoolSettings,
    ) -> None:
        pseudo = _pseudo_items(positives, pool, len(seen), settings)
        own = positives
        if settings.hides_sizes:
            own = [np.concatenate(pair) for pair in zip(positives, pseudo, strict=True)]
        candidates = _negative_candidates(pool, seen, settings)
        self._unliked = Unliked(own, len(seen), candidates)
        none = np.empty(0, dtype=np.int64)
        users, liked, is_pseudo = [none], [none], [none.astype(np.bool_)]
        for user, (rows, extra) in enumerate(zip(positives, pseudo, strict=True)):
            if len(rows) == 0 or self._unliked.counts[user] == 0:
                continue
            users.append(np.full(len(rows) + len(extra), user, dtype=np.int64))
            liked += [rows, extra]
            is_pseudo += [np.zeros(len(rows), np.bool_), np.ones(len(extra), np.bool_)]
        self._user = np.concatenate(users)
        self._positive = np.concatenate(liked)
        self._borrows = np.concatenate(is_pseudo)
        self._weight = np.where(self._borrows, settings.pseudo_weight, 1).astype(np.float32)
        # Who borrows a negative: the pseudo-items, or nobody.
        self._borrows &= not settings.hides_sizes
        self._lender = _lenders(self._user, self._borrows, len(positives))

    def draw(self, most: int, rng: np.random.Generator) -> Triples:
        """One epoch's triples: all, or ``most`` of them without replacement where it is not 0."""
        user, positive, weight = self._user, self._positive, self._weight
        lender = self._lender
        if 0 < most < len(user):
            kept = np.sort(rng.choice(len(user), size=most, replace=False))
            user, positive, weight = user[kept], positive[kept], weight[kept]
            lender = _lenders(user, self._borrows[kept], len(self._unliked.counts))
        own = np.flatnonzero(lender == np.arange(len(lender)))
        negative = np.empty(len(user), dtype=np.int64)
        negative[own] = self._unliked.draw(user[own], rng)
        return Triples(user, positive, negative[lender], weight)


def _pseudo_items(
    positives: Sequence[Rows], pool: Rows, catalogue: int, settings: PoolSettings
) -> list[Rows]:
    """Each user's part of the pool, without what it came to like since."""
    parts, taken = [], 0
    for rows in positives:
        count = settings.pseudo_items(len(rows))
        part = pool[taken : taken + count]
        if settings.hides_sizes:
            # Half of what a user leaves over stays, to draw negatives from.
            part = part[: (catalogue - len(rows)) // 2]
        taken += count
        parts.append(part[~np.isin(part, rows)])
    return parts


def _lenders(user: Rows, borrows: NDArray[np.bool_], users: int) -> Rows:
    """For each triple, the place of the one whose negative it takes, int64 [triples].

    ``user`` is increasing, and each user's borrowing triples stand behind its others. A user's n-th
    one takes the n-th other's, round and round; without any it has its own.
    """
    places = np.arange(len(user))
    lending = np.bincount(user[~borrows], minlength=users)[user]
    first = np.searchsorted(user, user)
    borrowed = first + (places - first - lending) % np.maximum(lending, 1)
    return np.where(borrows & (lending > 0), borrowed, places)


def _negative_candidates(
    pool: Rows, seen: NDArray[np.bool_], settings: PoolSettings
) -> Rows | None:
    if settings.negatives_per_positive == 0:
        return None
    # Rows that other local users liked are uploaded anyway: using them reveals nothing more.
    shown = seen.copy()
    shown[pool] = True
    return np.flatnonzero(shown)
