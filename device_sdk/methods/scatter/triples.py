"""What a device learns from: triples of a user, a liked item and one that is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.methods.learner import LearnerError

# Uniform draws from the items that a user has not interacted with.

Rows = NDArray[np.int64]


class Unliked:
    """For each local user the items of ``candidates`` outside its own, by rank.

    The items that a user leaves over are never listed: the one of rank r lies behind as many of
    the user's own items as have at most r others before them. So memory is that of the
    interactions, whatever the catalogue's length, and a draw needs no second try.

    Args:
        positives: per local user the distinct item rows of its interactions, all of them among
            ``candidates``.
        catalogue: number of items.
        candidates: increasing item rows to draw from; None stands for the whole catalogue.
    """

    def __init__(
        self, positives: Sequence[Rows], catalogue: int, candidates: Rows | None = None
    ) -> None:
        total = catalogue if candidates is None else len(candidates)
        place: Rows | None = None
        if candidates is not None:
            place = np.zeros(catalogue, dtype=np.int64)
            place[candidates] = np.arange(total)
        own = [np.sort(rows if place is None else place[rows]) for rows in positives]
        lengths = np.array([len(rows) for rows in own], dtype=np.int64)
        self._candidates = candidates
        self._begin = np.cumsum(lengths) - lengths
        # Users' keys are kept apart by a stride that none of their ranks reaches.
        self._stride = total + 1
        keys = [user * self._stride + rows - np.arange(len(rows)) for user, rows in enumerate(own)]
        self._keys = np.concatenate([np.empty(0, dtype=np.int64), *keys])
        self.counts: Rows = total - lengths
        """Per user the number of items to draw from, int64 [users]."""

    def draw(self, users: Rows, rng: np.random.Generator) -> Rows:
        """One item row for each entry of ``users``, int64 like it; none of them may lack any."""
        each = 0 if len(self.counts) == 1 else users  # one user's numbers need no look-up
        # The largest random() is 1 - 2**-53, so that no product rounds up to its count.
        rank = (rng.random(len(users)) * self.counts[each]).astype(np.int64)
        passed = self._keys.searchsorted(each * self._stride + rank, "right")
        item = rank + passed - self._begin[each]
        return item if self._candidates is None else self._candidates[item]


# Partial-order triples (user, liked item, other item), drawn fresh for each epoch.


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
        taking, parts = [], [np.empty(0, dtype=np.int64)]
        for user, pair in enumerate(zip(positives, pseudo, strict=True)):
            if len(pair[0]) and self._unliked.counts[user]:
                taking.append(user)
                parts += pair
        lengths = np.array([len(part) for part in parts[1:]], dtype=np.int64).reshape(-1, 2)
        self._user = np.array(taking, dtype=np.int64).repeat(lengths.sum(axis=1))
        self._positive = np.concatenate(parts)
        is_pseudo = (np.arange(lengths.size) % 2 == 1).repeat(lengths.reshape(-1))
        self._weight = np.where(is_pseudo, settings.pseudo_weight, 1).astype(np.float32)
        # Who borrows a negative: the pseudo-items, or nobody.
        self._borrows = is_pseudo & (not settings.hides_sizes)
        self._drawing, self._lender = _lenders(self._user, self._borrows, len(positives))

    def draw(self, most: int, rng: np.random.Generator) -> Triples:
        """One epoch's triples: all, or ``most`` of them without replacement where it is not 0."""
        user, positive, weight = self._user, self._positive, self._weight
        drawing, lender = self._drawing, self._lender
        if 0 < most < len(user):
            kept = np.sort(rng.choice(len(user), size=most, replace=False))
            user, positive, weight = user[kept], positive[kept], weight[kept]
            drawing, lender = _lenders(user, self._borrows[kept], len(self._unliked.counts))
        return Triples(user, positive, self._unliked.draw(drawing, rng).take(lender), weight)


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
        liked = np.zeros(catalogue, dtype=np.bool_)
        liked[rows] = True
        parts.append(part[~liked[part]])
    return parts


def _lenders(user: Rows, borrows: NDArray[np.bool_], users: int) -> tuple[Rows, Rows]:
    """The users of the triples that draw a negative, in order, and for each triple the place of its
    own or borrowed one among those, int64 [triples].

    ``user`` is increasing, and each user's borrowing triples stand behind its others. A user's n-th
    one takes the n-th other's, round and round; without any it has its own.
    """
    lending = np.bincount(user[~borrows], minlength=users)
    borrows = borrows & (lending > 0)[user]
    drawing = user[~borrows]
    lender = np.cumsum(~borrows) - 1
    borrower = user[borrows]
    if len(borrower):
        borrowing = np.bincount(borrower, minlength=users)
        # A user's first draw, and which of its borrowing triples each is.
        first = (np.cumsum(np.bincount(drawing, minlength=users)) - lending)[borrower]
        rank = np.arange(len(borrower)) - (np.cumsum(borrowing) - borrowing)[borrower]
        lender[borrows] = first + rank % lending[borrower]
    return drawing, lender


def _negative_candidates(
    pool: Rows, seen: NDArray[np.bool_], settings: PoolSettings
) -> Rows | None:
    if settings.negatives_per_positive == 0:
        return None
    # Rows that other local users liked are uploaded anyway: using them reveals nothing more.
    shown = seen.copy()
    shown[pool] = True
    return np.flatnonzero(shown)


# The fixed set of unseen items that a device shows beside the ones its users touched.
#
# The rows of an update tell which items took part in training. A set of extra items that
# changed every round could be intersected away, so each device draws its set once and only ever
# adds to it.

_MOST_TELLING_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class PoolSettings(Declared):
    """How many unseen items a device mixes in. A device's own choice, never the aggregator's.

    They do not hide what is true from an aggregator that looks at the values of updates: what they
    are measured to hide, and at which price, is in ``docs/methods/scatter/privacy.md``.

    Attributes:
        pseudo_per_positive: pseudo-items per true interaction. They take part in every epoch as
            weak positives, and their rows are uploaded as often as those of true positives.
        pseudo_weight: weight of a pseudo-item's triple against 1 for a true one. With less than 1,
            one update shows by its sizes which items are true.
        negatives_per_positive: size of the pool that negatives come from, per true interaction,
            or 0 for every unseen item (more accurate; each single row is then seen more rarely).
        smallest_pool: lower bound of that pool's size when ``negatives_per_positive`` is not 0.

    Raises ValueError for a negative or non-finite number.
    """

    pseudo_per_positive: Annotated[float, Within(0)] = 0.0
    pseudo_weight: Annotated[float, Within(0)] = 0.1
    negatives_per_positive: Annotated[float, Within(0)] = 0.0
    smallest_pool: Annotated[int, Within(0)] = 0

    @property
    def hides_sizes(self) -> bool:
        """Whether weights are near enough to leave anything to hide.

        If so, pseudo-items are treated like true ones in all else too, at the cost of more rows.
        """
        return self.pseudo_weight > _MOST_TELLING_WEIGHT

    def pseudo_items(self, positives: int) -> int:
        """Number of pseudo-items of a device with that many interactions."""
        return math.ceil(self.pseudo_per_positive * positives)

    def pool_size(self, positives: int) -> int:
        """Number of items that must be in the pool of a device with that many interactions."""
        negatives = math.ceil(self.negatives_per_positive * positives)
        if self.negatives_per_positive > 0:
            negatives = max(negatives, self.smallest_pool)
        pseudo = self.pseudo_items(positives)
        # Pseudo-items that are no negatives leave the pool's other part for those.
        return negatives + pseudo if self.hides_sizes else max(negatives, pseudo)


def grow_pool(
    pool: NDArray[np.int64],
    seen: NDArray[np.bool_],
    size: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Append random unseen items until ``pool`` holds ``size`` of them, or all there are.

    What is in the pool stays, in its place, also when a user has come to like it since: any prefix
    is as fixed as the whole.

    Args:
        pool: item rows drawn so far, distinct.
        seen: bool [items], true where any local user has interacted with the item.
        size: wanted length.
        rng: source of the draw.
    """
    if len(pool) >= size:
        return pool
    free = ~seen
    free[pool] = False
    unseen = np.flatnonzero(free)
    drawn = rng.choice(unseen, size=min(size - len(pool), len(unseen)), replace=False)
    return np.concatenate([pool, drawn.astype(np.int64)])


# A device's pool and triples, prepared once for as long as its data stays the same.


class LocalTriples:
    """Makes a :class:`TripleSource` anew only where interactions, catalogue or pool have changed.

    Args:
        settings: the device's own choice of what to mix in.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._items: Rows = np.empty(0, dtype=np.int64)
        self._lengths: list[int] = []
        self._catalogue = -1
        self._pool: Rows = np.empty(0, dtype=np.int64)
        self._source: TripleSource | None = None

    def of(
        self, positives: Sequence[Rows], catalogue: int, pool: Rows, rng: np.random.Generator
    ) -> tuple[Rows, TripleSource]:
        """The pool, longer than ``pool`` where it must grow, and the source that goes with it.

        Args:
            positives: per local user the distinct item rows of its interactions.
            catalogue: number of items.
            pool: the device's fixed pool so far.
            rng: draws what the pool lacks.

        Raises LearnerError when an interaction's item is outside the catalogue.
        """
        lengths = [len(rows) for rows in positives]
        # Contents are compared, at a few microseconds: arrays may be the same and yet changed.
        items = np.concatenate([np.empty(0, dtype=np.int64), *positives])
        if (
            self._source is not None
            and catalogue == self._catalogue
            and lengths == self._lengths
            and (items == self._items).all()
            and (pool is self._pool or np.array_equal(pool, self._pool))
        ):
            return self._pool, self._source
        _require_in_catalogue(items, catalogue)
        seen = seen_by_anyone(positives, catalogue)
        grown = grow_pool(pool, seen, self.settings.pool_size(len(items)), rng)
        source = TripleSource(positives, grown, seen, self.settings)
        self._items, self._lengths, self._catalogue = items, lengths, catalogue
        self._pool, self._source = grown, source
        return grown, source

    def pseudo_items(
        self, positives: Sequence[Rows], catalogue: int, pool: Rows, rng: np.random.Generator
    ) -> tuple[Rows, list[Rows]]:
        """The pool, as :meth:`of` has it, and each user's pseudo-items, which may be none.

        Raises LearnerError when an interaction's item is outside the catalogue.
        """
        items = np.concatenate([np.empty(0, dtype=np.int64), *positives])
        _require_in_catalogue(items, catalogue)
        wanted = self.settings.pseudo_items(len(items))
        if not wanted:
            return pool, [items[:0]] * len(positives)
        grown = grow_pool(pool, seen_by_anyone(positives, catalogue), wanted, rng)
        return grown, _pseudo_items(positives, grown, catalogue, self.settings)


def _require_in_catalogue(items: Rows, catalogue: int) -> None:
    if len(items) and (items.min() < 0 or items.max() >= catalogue):
        raise LearnerError(
            f"the local data names item row {int(items.max())}, but the broadcast has "
            f"{catalogue} items; the catalogue on the device is not the broadcast's"
        )
