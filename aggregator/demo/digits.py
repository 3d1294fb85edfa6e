"""Handwritten digits, which come with scikit-learn, dealt to devices that each see few kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Batch = Mapping[str, NDArray[np.generic]]

EACH = 30
"""Pictures on a device: the same number on all, so that a device's speed alone decides what it can
train in time."""
MOST_DEVICES = 48
_TEST = 357
_UNEVENNESS = 0.3


@dataclass(frozen=True, eq=False)
class DealtDigits:
    """Batches of ``x`` float32 [pictures, 1, 8, 8] in [0, 1], and ``y`` int64 [pictures].

    ``train``: one for each device. ``test``: pictures that are on no device.
    """

    train: tuple[Batch, ...]
    test: Batch


def deal_digits(devices: int, rng: np.random.Generator) -> DealtDigits:
    """Deal pictures out: each device draws its own mix of the ten digits from a Dirichlet
    distribution of concentration 0.3 (Hsu, Qi, Brown 2019, section 4), so that most of a device's
    pictures are of two or three digits. Raises ValueError for more than 48 devices."""
    if devices > MOST_DEVICES:
        raise ValueError(f"{devices} devices; the pictures are enough for {MOST_DEVICES}")
    found = load_digits()
    x = ((found.images - 4.9) / 6).astype(np.float32)[:, np.newaxis]
    label = found.target.astype(np.int64)
    order = rng.permutation(len(label))
    test, rest = order[:_TEST], order[_TEST:]
    left = [list(rest[label[rest] == digit]) for digit in range(10)]
    train = []
    for _ in range(devices):
        mix = rng.dirichlet(np.full(10, _UNEVENNESS)) + 1e-9
        rows = []
        for _ in range(EACH):
            chances = np.array(
                [share if kept else 0.0 for share, kept in zip(mix, left, strict=True)]
            )
            digit = int(rng.choice(10, p=chances / chances.sum()))
            rows.append(left[digit].pop())
        train.append({"x": x[rows], "y": label[rows]})
    return DealtDigits(tuple(train), {"x": x[test], "y": label[test]})
