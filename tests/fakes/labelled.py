"""Samples around a centre for each of three labels, and what a learner keeps, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_sdk.local_data import LocalData
from device_sdk.methods.learner import Learner

CLASSES, FEATURES = 3, 4


def samples(count: int, seed: int, labels: Sequence[int] = (0, 1, 2)) -> LocalData:
    rng = np.random.default_rng(seed)
    label = rng.choice(np.asarray(labels), size=count)
    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES))
    x = centres[label] + 0.3 * rng.standard_normal((count, FEATURES))
    return LocalData({"x": x.astype(np.float32), "label": label.astype(np.int64)})


def unfit(label: Sequence[int], value: float = 0.0, width: int = FEATURES) -> LocalData:
    """Two samples of these labels, all of whose numbers are the same."""
    return LocalData({"x": np.full((2, width), value, np.float32), "label": np.array(label)})


def frozen(one: Learner) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in one.state().items()}
