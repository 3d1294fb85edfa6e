"""What a click model predicts for samples, and how good that is over devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommendation.click_metrics import ClickQuality, click_quality
from device_sdk.methods.local_steps import predict_all
from device_sdk.trainer import Trainer

Samples = Mapping[str, NDArray[Any]]
Predictions = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
"""Of each sample: the label, the click's predicted probability, and the user."""


def entries_of(trainer: Trainer, samples: Samples) -> Samples:
    """Those entries that the trainer's artifact reads: only some networks want the history."""
    wanted = {port.of for port in trainer.artifact.graphs["train"].select("batch")}
    return {name: array for name, array in samples.items() if name in wanted}


def clicks_predicted(trainer: Trainer, samples: Samples) -> NDArray[np.float32]:
    """The probability of a click, [samples]."""
    return predict_all(trainer, entries_of(trainer, samples), "click", batch_size=512)


def predictions(trainer: Trainer, samples: Samples) -> Predictions:
    """Of one device's samples."""
    return samples["label"], clicks_predicted(trainer, samples), samples["categories"][:, 0]


def joined_quality(found: Sequence[Predictions]) -> ClickQuality:
    """Over all devices' samples together."""
    labels, clicks, users = (np.concatenate(part) for part in zip(*found, strict=True))
    return click_quality(labels, clicks, users)
