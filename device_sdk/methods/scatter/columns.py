"""Which columns of the factor matrices a device trains this round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal_columns", "left_out"]

Columns = NDArray[np.int64]


def deal_columns(
    deck: Columns, total: int, count: int, rng: np.random.Generator
) -> tuple[Columns, Columns]:
    """This round's columns, increasing, and what is left of the deck for the next rounds.

    Columns are fresh each round (the patent's "feature filter layer", steps 2 and 3), but dealt
    like cards: from a shuffled deck of all ``total`` columns, and only when it runs out are they
    shuffled again. A device with few columns so reaches each part of its vectors equally often,
    which independent draws do not; on MovieLens 100K that is worth a point of HR@10.

    Args:
        deck: columns still to deal, from the last call; empty at the start.
        total: K.
        count: k_i; all columns come where it reaches ``total``.
        rng: shuffles.
    """
    if count >= total:
        return np.arange(total, dtype=np.int64), deck[:0]
    hand = deck[:count]
    rest = deck[count:]
    if len(hand) < count:
        fresh = rng.permutation(left_out(total, hand))
        missing = count - len(hand)
        hand, rest = np.concatenate([hand, fresh[:missing]]), fresh[missing:]
    return np.sort(hand), rest


def left_out(total: int, columns: Columns) -> Columns:
    """The columns that are not in ``columns``, increasing."""
    out = np.ones(total, dtype=np.bool_)
    out[columns] = False
    return np.flatnonzero(out)
