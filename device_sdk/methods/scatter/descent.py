"""A step down the loss by devices of equal k, what they drew laid side by side in two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import ScatterTraining
from device_sdk.methods.scatter.factor_step import Blocks, FactorBatch, FactorStep, is_finite
from device_sdk.methods.scatter.triples import Triples
from device_sdk.wire.publish.report import Reason

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_TOGETHER_BYTES = 4 << 20
"""Of what a batch of devices takes at a time: more does not stay in a processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What a device enters a round with, and drew for it.

    ``users``: U, float32 [users, K], which stays as it is; ``columns``: int64 [k], increasing.
    ``pool`` and ``deck`` are what the learner keeps of the draws.
    """

    users: Floats
    columns: Rows
    triples: Triples
    pool: Rows
    deck: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """What a step made of it.

    ``users``: the new U; ``rows``: int64 [r], increasing, the items that the triples name;
    ``values``: float32 [r, k], the gradients of their drawn columns, summed over the triples.
    """

    users: Floats
    rows: Rows
    values: Floats


def descend(
    items: NDArray[Any], training: ScatterTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved | LearnerError]:
    """One step of each device at ``items``, float16 or float32 [items, K]; their order is kept."""
    found: list[Moved | LearnerError] = [
        Moved(one.users, np.empty(0, dtype=np.int64), np.empty((0, len(one.columns)), dtype=np.float32))
        for one in drawn
    ]
    for batch in _batches(drawn, items.shape):
        moved = _apart(items, training, step, [drawn[place] for place in batch])
        for place, one in zip(batch, moved, strict=True):
            found[place] = one
    return found


def _batches(drawn: Sequence[Drawn], shape: tuple[int, ...]) -> Iterator[list[int]]:
    """Places of devices that have triples, and may take a step together."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, one in enumerate(drawn):
        if len(one.triples):
            # The number of its users may say how a device computes: see StepByUsers.
            alike.setdefault((len(one.columns), len(one.users) == 1), []).append(place)
    for places in alike.values():
        batch: list[int] = []
        size = 0
        for place in places:
            more = 9 * shape[0] + 8 * len(drawn[place].triples) * shape[1]
            if batch and size + more > _TOGETHER_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += more
        yield batch


def _apart(
    items: NDArray[Any], training: ScatterTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> Sequence[Moved | LearnerError]:
    """A batch's steps; where one of them fails, each half is tried by itself."""
    try:
        return _together(items, training, step, drawn)
    except LearnerError as error:
        if len(drawn) == 1:
            return [error]
    half = len(drawn) // 2
    return [
        *_apart(items, training, step, drawn[:half]),
        *_apart(items, training, step, drawn[half:]),
    ]


def _together(
    items: NDArray[Any], training: ScatterTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved]:
    """A batch's steps in one. Raises LearnerError where one device's fails."""
    width, k = items.shape[1], len(drawn[0].columns)
    lengths = [len(one.triples) for one in drawn]
    counts = [len(one.users) for one in drawn]
    users = np.concatenate([one.users for one in drawn])
    user = _shifted([one.triples.user for one in drawn], lengths, counts)
    weight = np.concatenate([one.triples.weight for one in drawn])
    # Device by device, as if each had a catalogue of its own.
    catalogues = [len(items)] * len(drawn)
    named, positive, negative = touched_rows(
        _shifted([one.triples.positive for one in drawn], lengths, catalogues),
        _shifted([one.triples.negative for one in drawn], lengths, catalogues),
        len(items) * len(drawn),
    )
    bounds = np.searchsorted(named, np.arange(len(drawn) + 1) * len(items))
    own_rows = np.diff(bounds)
    rows = named - (np.arange(len(drawn)) * len(items)).repeat(own_rows)
    blocks = Blocks(counts, own_rows.tolist())

    touched = items.take(rows, axis=0).astype(np.float32, copy=False)
    if not is_finite(touched):
        raise LearnerError("the broadcast's 'items' hold values that are not finite")
    offset = np.zeros(len(user), dtype=np.float32)
    part_of_users, part_of_items = users, touched
    if k < width:
        each = np.arange(len(users))[:, None]
        columns = np.stack([one.columns for one in drawn]).repeat(counts, axis=0)
        part_of_users = users[each, columns]
        part_of_items = np.empty((len(touched), k), dtype=np.float32)
        for one, (_, of_rows, _) in zip(drawn, blocks, strict=True):
            touched[of_rows].take(one.columns, 1, part_of_items[of_rows], "clip")
        if training.scores == "residual":
            # Constant over the step, so that the drawn columns fit what the others leave over.
            rest = users.copy()
            rest[each, columns] = 0
            scores = blocks.scores(rest, touched)
            offset = scores.take(blocks.cells_of(user, positive))
            offset -= scores.take(blocks.cells_of(user, negative))
    gradients = step.gradients(
        part_of_users,
        part_of_items,
        FactorBatch(
            user, positive, negative, weight, offset, training.user_l2, training.item_l2, blocks
        ),
    )
    sizes = np.bincount(user, weight, len(users))
    # A sum over n triples grows like n, its noise like sqrt(n): this rate suits users of any n.
    rates = (training.user_learning_rate / np.sqrt(np.maximum(sizes, 1))).astype(np.float32)
    part_of_users = part_of_users - rates[:, None] * gradients.users
    if k < width:
        users[each, columns] = part_of_users
    else:
        users = part_of_users
    if not is_finite(users):
        raise LearnerError(
            "training diverged: a user's vector is not finite; lower the rates",
            Reason.NOT_FINITE,
        )
    return [
        Moved(users[mine].copy(), rows[of_rows], gradients.items[of_rows])
        for mine, of_rows, _ in blocks
    ]


def _shifted(parts: Sequence[Rows], lengths: Sequence[int], sizes: Sequence[int]) -> Rows:
    """Numbers of devices' own things, of which each has ``sizes``, counted through all devices."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum(sizes) - sizes
    return np.concatenate(parts) + before.repeat(lengths)


def touched_rows(positive: Rows, negative: Rows, catalogue: int) -> tuple[Rows, Rows, Rows]:
    """The distinct items, increasing, and where each of ``positive`` and ``negative`` lies in them.

    All int64. A table over the catalogue is several times faster than sorting.
    """
    is_touched = np.zeros(catalogue, dtype=np.bool_)
    is_touched[positive] = True
    is_touched[negative] = True
    rows = np.flatnonzero(is_touched)
    place = np.empty(catalogue, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    return rows, place.take(positive), place.take(negative)
