"""Scatter's contract: the training settings of a broadcast, and the body of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings, Update
from device_sdk.wire.arrays.sparse import (
    SparseRows,
    decode_sparse,
    decode_sparse_each,
    encode_sparse,
)
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.task_messages import UPDATE_CODECS

# The training settings that a scatter broadcast carries, known to both ends.

Scores = Literal["residual", "columns"]


@dataclass(frozen=True, slots=True)
class ScatterTraining(TrainingSettings):
    """How every device trains in a round of scatter aggregation.

    Attributes:
        scores: ``columns`` scores a triple by the drawn columns alone (the patent's); ``residual``
            adds the score of the left-out columns as a constant, so that every device descends the
            same full objective on its own block of coordinates.
        user_learning_rate: a local user's vector moves by this rate times its gradient, summed
            over its triples and divided by the square root of their total weight.
        user_l2: weight of half the users' squared norms in the loss, once per triple.
        item_l2: likewise of the items'.
        user_spread: standard deviation of a new user's vector.
        most_triples: at most so many triples a device and round, drawn at random; 0 for all.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    scores: Scores = "residual"
    user_learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.7
    user_l2: Annotated[float, Within(0, 1e3)] = 0.01
    item_l2: Annotated[float, Within(0, 1e3)] = 0.001
    user_spread: Annotated[float, Within(0, 10, above=True)] = 0.01
    most_triples: Annotated[int, Within(0)] = 0


# A scatter update, between the learner's named arrays and the bytes of an update's body.


def encode_scatter_update(
    update: Update, width: int, update_codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The body of ``update``, whose tensors are ``columns``, ``rows`` and ``values``.

    ``width``: the task's K, the second dimension of the broadcast's ``items``. ``rng`` is needed
    for ``int8`` only. Raises ValueError for arrays that do not fit.
    """
    tensors = update.tensors
    sparse = SparseRows(tensors["columns"], tensors["rows"], tensors["values"], width)
    return encode_sparse(sparse, UPDATE_CODECS[update_codec], rng)


def decode_scatter_update(
    body: bytes, round_id: int, items: int, width: int, sender: str = ""
) -> Update:
    """The update in ``body`` of ``sender`` for an item matrix [items, width]. Raises
    ``WireError``."""
    return _update(decode_sparse(body, items=items, width=width), round_id, sender)


def decode_scatter_updates(
    bodies: Sequence[tuple[bytes, str]], round_id: int, items: int, width: int
) -> list[Update | WireError]:
    """The updates in many bodies, each with its sender; an error in the place of a bad one."""
    found = decode_sparse_each([body for body, _ in bodies], items=items, width=width)
    return [
        each if isinstance(each, WireError) else _update(each, round_id, sender)
        for each, (_, sender) in zip(found, bodies, strict=True)
    ]


def _update(sparse: SparseRows, round_id: int, sender: str) -> Update:
    tensors: dict[str, NDArray[Any]] = {
        "columns": sparse.columns,
        "rows": sparse.rows,
        "values": sparse.values,
    }
    return Update(round_id=round_id, tensors=tensors, sender=sender)
