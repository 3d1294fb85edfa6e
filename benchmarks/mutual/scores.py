"""Accuracies of the paper (section 3.2), of the round that validation picks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.mutual.domains import Domain, everything
from benchmarks.mutual.experiment import DeviceScore
from device_sdk import Trainer
from device_sdk.methods.local_steps import predict_all

_OUTPUT = "probabilities"


class Scoreboard:
    """Keeps, for each device, the test scores of its best round by validation."""

    def __init__(self, domains: Sequence[Domain]) -> None:
        self._validation = everything(domains, "validation")
        self._test = everything(domains, "test")
        self._owner = np.repeat(np.arange(len(domains)), [len(one.test["y"]) for one in domains])
        self._best: dict[int, DeviceScore] = {}
        self.curve: list[float] = []

    def look(self, round_id: int, trainers: Sequence[Trainer]) -> None:
        """Score all devices' models; one trainer given several times is looked at once.

        Test samples are predicted where validation is at its best so far, and play no part in that.
        """
        seen: dict[int, tuple[float, NDArray[np.bool_] | None]] = {}
        found = []
        for device, trainer in enumerate(trainers):
            best = self._best.get(device)
            validation, right = seen.get(id(trainer), (-1.0, None))
            if validation < 0:
                validation = 100 * float(np.mean(_right(trainer, self._validation)))
            if best is None or validation > best.validation:
                if right is None:
                    right = _right(trainer, self._test)
                own = self._owner == device
                self._best[device] = DeviceScore(
                    round_id,
                    validation,
                    acc=100 * float(right.mean()),
                    bwt=100 * float(right[own].mean()),
                    fwt=100 * float(right[~own].mean()),
                )
            seen[id(trainer)] = (validation, right)
            found.append(validation)
        self.curve.append(float(np.mean(found)))

    @property
    def scores(self) -> tuple[DeviceScore, ...]:
        """By device."""
        return tuple(self._best[device] for device in sorted(self._best))


def _right(trainer: Trainer, samples: dict[str, NDArray[np.generic]]) -> NDArray[np.bool_]:
    predicted = predict_all(trainer, {"x": samples["x"]}, _OUTPUT).argmax(axis=1)
    right: NDArray[np.bool_] = predicted == samples["y"]
    return right
