"""What devices of a scatter task send whose loss is least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tensors = dict[str, NDArray[Any]]


def one_user(
    columns: ArrayLike, rows: ArrayLike, pulls: ArrayLike, vector: ArrayLike | None = None
) -> Tensors:
    """A device of one user, whose gradient is ``pulls`` [rows] times ``vector`` [columns]; ones
    where None is given."""
    k = len(np.asarray(columns))
    return users(
        columns,
        rows,
        np.reshape(pulls, (-1, 1)),
        np.reshape(np.ones(k) if vector is None else vector, (1, k)),
    )


def of_gradient(columns: ArrayLike, rows: ArrayLike, values: ArrayLike) -> Tensors:
    """A device whose gradient is ``values`` [rows, columns], of as many users as columns."""
    return users(columns, rows, values, np.eye(len(np.asarray(columns))))


def users(columns: ArrayLike, rows: ArrayLike, pulls: ArrayLike, factor: ArrayLike) -> Tensors:
    """A device of as many users as ``factor`` has rows, one of whom has each item."""
    touched = np.asarray(rows, dtype=np.int64)
    return {
        "columns": np.asarray(columns, dtype=np.int64),
        "rows": touched,
        "pulls": np.asarray(pulls, dtype=np.float32),
        "factor": np.asarray(factor, dtype=np.float32),
        "counts": np.ones(len(touched), dtype=np.int64),
        "users": np.asarray(len(np.asarray(factor)), dtype=np.int64),
    }
