"""What devices of a scatter task send whose loss is least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregator.methods.scatter_loss import LeastSquaresSettings

ONE_WIDTH = LeastSquaresSettings(most_columns=0)
"""Of tests whose updates are of one width, whatever the model's would become."""
Tensors = dict[str, NDArray[Any]]


def one_user(
    width: int, rows: ArrayLike, pulls: ArrayLike, vector: ArrayLike = 1.0, columns: ArrayLike = ()
) -> Tensors:
    """A device of one user, whose gradient is ``pulls`` [rows] times ``vector`` [columns], zero in
    others; no columns stand for all."""
    chosen = np.asarray(columns, dtype=np.int64) if np.size(columns) else np.arange(width)
    whole = np.zeros((1, width))
    whole[0, chosen] = vector
    return users(rows, np.reshape(pulls, (-1, 1)), whole, len(chosen))


def of_gradient(rows: ArrayLike, values: ArrayLike) -> Tensors:
    """A device whose gradient is ``values`` [rows, K], of as many users as columns."""
    return users(rows, values, np.eye(np.shape(values)[1]))


def of_triples(rows: ArrayLike, columns: ArrayLike, seed: int = 0) -> Tensors:
    """What a device sends of a task whose loss is BPR: random values [rows, columns]."""
    shape = np.size(rows), np.size(columns)
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    chosen, touched = (np.asarray(each, dtype=np.int64) for each in (columns, rows))
    return {"columns": chosen, "rows": touched, "values": values}


def users(rows: ArrayLike, pulls: ArrayLike, factor: ArrayLike, k: int | None = None) -> Tensors:
    """A device of as many users as ``factor`` [users, K] has rows, one of whom has each item."""
    touched, wide = np.asarray(rows, dtype=np.int64), np.asarray(factor, dtype=np.float32)
    return {
        "rows": touched,
        "pulls": np.asarray(pulls, dtype=np.float32),
        "factor": wide,
        "counts": np.ones(len(touched), dtype=np.int64),
        "users": np.asarray(len(wide), dtype=np.int64),
        "k": np.asarray(wide.shape[1] if k is None else k, dtype=np.int64),
    }
