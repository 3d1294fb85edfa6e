"""What a device tells of each of its labels: a mean vector, and of how many samples; both ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_CLASSES = 4096
_MOST_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LabelKnowledge:
    """Mean vectors by label, of the labels that a device has.

    Attributes:
        labels: int64 [n], increasing.
        counts: int64 [n], the samples that went into each mean, at least 1.
        means: float32 [n, width]: soft outputs, say, or embeddings.
    """

    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    means: NDArray[np.float32]


def encode_labels(knowledge: LabelKnowledge) -> dict[str, NDArray[Any]]:
    """``labels`` uint16 [n] and ``counts`` int32 [n]; the means travel as their method says."""
    return {
        "labels": knowledge.labels.astype(np.uint16),
        "counts": np.minimum(knowledge.counts, _MOST_COUNT).astype(np.int32),
    }


def decode_labels(
    tensors: Mapping[str, NDArray[Any]], classes: int, means: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The labels and counts that :func:`encode_labels` was given, beside arrays named ``means``.

    Total: raises ValueError for other names, dtypes, shapes or ranges, whatever the arrays hold.
    """
    expected = {"labels", "counts", *means}
    if set(tensors) != expected:
        raise ValueError(f"found {sorted(tensors)}; expected exactly {sorted(expected)}")
    labels, counts = tensors["labels"], tensors["counts"]
    if labels.dtype != np.uint16 or labels.ndim != 1:
        raise ValueError(f"'labels' are {labels.dtype} {labels.shape}; expected uint16 [n]")
    rows = labels.astype(np.int64)
    if len(rows) and (int(rows[-1]) >= classes or (np.diff(rows) <= 0).any()):
        raise ValueError(f"'labels' must increase, from 0 to {classes - 1}")
    if counts.dtype != np.int32 or counts.shape != rows.shape:
        raise ValueError(f"'counts' are {counts.dtype} {counts.shape}; expected int32 [labels]")
    if len(counts) and int(counts.min()) < 1:
        raise ValueError("a count is below 1: labels without samples are left out")
    return rows, counts.astype(np.int64)
