"""A step down the loss by devices of equal k, what they drew laid side by side in two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import BprTraining
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
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved | LearnerError]:
    """One step of each device at ``items``, float16 or float32 [items, K]; their order is kept."""
    found: dict[int, Moved | LearnerError] = {}
    for batch in _batches(drawn, items.shape):
        moved = _apart(items, training, step, [drawn[place] for place in batch])
        found.update(zip(batch, moved, strict=True))
    return [found[place] if place in found else _unmoved(one) for place, one in enumerate(drawn)]


def _unmoved(drawn: Drawn) -> Moved:
    """Of a device without triples."""
    values = np.empty((0, len(drawn.columns)), dtype=np.float32)
    return Moved(drawn.users, np.empty(0, dtype=np.int64), values)


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
            triples, users = len(drawn[place].triples), len(drawn[place].users)
            more = 9 * shape[0] + 8 * triples * (shape[1] + users)
            if batch and size + more > _TOGETHER_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += more
        yield batch


def _apart(
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> Sequence[Moved | LearnerError]:
    """A batch's steps; where one of them fails, each half is tried by itself."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
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
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved]:
    """A batch's steps in one. Raises LearnerError where one device's fails."""
    all_of = _laid(drawn, len(items))
    users, triples, blocks = all_of.users, all_of.triples, all_of.blocks
    touched = items.take(all_of.rows, axis=0).astype(np.float32, copy=False)
    if not is_finite(touched):
        raise LearnerError("the broadcast's 'items' hold values that are not finite")
    offset = np.zeros(len(triples), dtype=np.float32)
    some_users, some_items = users, touched
    partial = len(drawn[0].columns) < items.shape[1]
    if partial:
        columns = np.array([one.columns for one in drawn]).repeat(all_of.counts, axis=0)
        places = np.arange(len(users))[:, None], columns
        some_users = users[places]
        parts = zip(drawn, blocks, strict=True)
        some_items = np.concatenate(
            [touched[rows].take(one.columns, 1) for one, (_, rows, _) in parts]
        )
        if training.scores == "residual":
            # Constant over the step, so that the drawn columns fit what the others leave over.
            rest = users.copy()
            rest[places] = 0
            offset = blocks.margins(rest, touched, triples.user, triples.positive, triples.negative)
    batch = FactorBatch(
        triples.user, triples.positive, triples.negative, triples.weight, offset,
        training.user_l2, training.item_l2, blocks,
    )  # fmt: skip
    gradients = step.gradients(some_users, some_items, batch)
    sizes = np.bincount(triples.user, triples.weight, len(users))
    # A sum over n triples grows like n, its noise like sqrt(n): this rate suits users of any n.
    rates = (training.user_learning_rate / np.sqrt(np.maximum(sizes, 1))).astype(np.float32)
    some_users = some_users - rates[:, None] * gradients.users
    if partial:
        users[places] = some_users
    else:
        users = some_users
    if not is_finite(users):
        raise LearnerError(
            "training diverged: a user's vector is not finite; lower the rates",
            Reason.NOT_FINITE,
        )
    return [
        Moved(users[mine].copy(), all_of.rows[rows], gradients.items[rows])
        for mine, rows, _ in blocks
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """Devices side by side: ``users`` [all users, K], a copy, and ``rows`` of the catalogue
    [all rows], of which ``triples`` name the places. ``counts``: users by device."""

    users: Floats
    counts: list[int]
    rows: Rows
    triples: Triples
    blocks: Blocks


def _laid(drawn: Sequence[Drawn], catalogue: int) -> _Laid:
    counts = [len(one.users) for one in drawn]
    # As if each device had a catalogue of its own.
    catalogues = [catalogue] * len(drawn)
    named, positive, negative = touched_rows(
        _joined([one.triples.positive for one in drawn], catalogues),
        _joined([one.triples.negative for one in drawn], catalogues),
        catalogue * len(drawn),
    )
    begins = np.arange(len(drawn)) * catalogue
    ends = [*named.searchsorted(begins[1:]).tolist(), len(named)]
    own_rows = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return _Laid(
        users=np.concatenate([one.users for one in drawn]),
        counts=counts,
        rows=named - begins.repeat(own_rows),
        triples=Triples(
            _joined([one.triples.user for one in drawn], counts),
            positive,
            negative,
            np.concatenate([one.triples.weight for one in drawn]),
        ),
        blocks=Blocks(counts, own_rows),
    )


def _joined(parts: Sequence[Rows], sizes: Sequence[int]) -> Rows:
    """Numbers of what each device has ``sizes`` of, counted through all devices, in one array."""
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, dtype=np.int64)
    return np.concatenate(parts) + begins.repeat([len(part) for part in parts])


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
