"""Partial-order triples (user, liked item, other item), drawn fresh for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from device_sdk.learners.pool import PoolSettings

__all__ = ["Triples", "draw_triples", "seen_by_anyone"]

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

    def sample(self, count: int, rng: np.random.Generator) -> Triples:
        """At most ``count`` of these triples, drawn without replacement; 0 keeps all."""
        if count == 0 or len(self) <= count:
            return self
        kept = np.sort(rng.choice(len(self), size=count, replace=False))
        return Triples(self.user[kept], self.positive[kept], self.negative[kept], self.weight[kept])


def seen_by_anyone(positives: Sequence[Rows], catalogue: int) -> NDArray[np.bool_]:
    """bool [catalogue]: true where any local user has interacted with the item."""
    seen = np.zeros(catalogue, dtype=np.bool_)
    for rows in positives:
        seen[rows] = True
    return seen


def draw_triples(
    positives: Sequence[Rows],
    pool: Rows,
    seen: NDArray[np.bool_],
    settings: PoolSettings,
    rng: np.random.Generator,
) -> Triples:
    """One epoch: a triple per interaction of each local user, and one per pseudo-item.

    A negative is any item of the device's pool (or of the whole catalogue) that is outside this
    user's own *training* items. Nothing else is left out: a user's future items, those of a test
    set included, are drawn as negatives like any other.

    Args:
        positives: per local user, the distinct item rows of its interactions.
        pool: the device's fixed pool, from ``grow_pool``.
        seen: from ``seen_by_anyone``.
        settings: sizes and weights of the pool's parts.
        rng: source of the draws.
    """
    candidates = _negative_candidates(pool, seen, settings)
    parts: list[tuple[Rows, Rows, Rows, NDArray[np.float32]]] = []
    taken = 0
    for user, rows in enumerate(positives):
        if len(rows) == 0:
            continue
        own = np.zeros(len(seen), dtype=np.bool_)
        own[rows] = True
        pseudo = pool[taken : taken + settings.pseudo_items(len(rows))]
        taken += len(pseudo)
        pseudo = pseudo[~own[pseudo]]
        unliked = candidates[~own[candidates]]
        if len(unliked) == 0:
            continue
        liked = np.concatenate([rows, pseudo])
        weight = np.ones(len(liked), dtype=np.float32)
        weight[len(rows) :] = settings.pseudo_weight
        negative = unliked[rng.integers(0, len(unliked), size=len(liked))]
        parts.append((np.full(len(liked), user, dtype=np.int64), liked, negative, weight))
    if not parts:
        none = np.empty(0, dtype=np.int64)
        return Triples(none, none, none, np.empty(0, dtype=np.float32))
    user_parts, positive_parts, negative_parts, weight_parts = zip(*parts, strict=True)
    return Triples(
        np.concatenate(user_parts),
        np.concatenate(positive_parts),
        np.concatenate(negative_parts),
        np.concatenate(weight_parts),
    )


def _negative_candidates(pool: Rows, seen: NDArray[np.bool_], settings: PoolSettings) -> Rows:
    if settings.negatives_per_positive == 0:
        return np.arange(len(seen), dtype=np.int64)
    # Rows that other local users liked are uploaded anyway: using them reveals nothing more.
    shown = seen.copy()
    shown[pool] = True
    return np.flatnonzero(shown)
