"""A scatter update, between the learner's named arrays and the bytes of an update's body."""

from __future__ import annotations

import numpy as np

from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.arrays.sparse import SparseRows, decode_sparse, encode_sparse
from device_sdk.wire.publish.task_messages import UPDATE_CODECS

__all__ = ["decode_scatter_update", "encode_scatter_update"]


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
    sparse = decode_sparse(body, items=items, width=width)
    return Update(
        round_id=round_id,
        tensors={"columns": sparse.columns, "rows": sparse.rows, "values": sparse.values},
        sender=sender,
    )
