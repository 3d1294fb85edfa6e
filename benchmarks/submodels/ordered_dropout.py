"""``OrderedDropout``: a device's part of a model, of which each step trains a part.

Horvath et al. 2021, FjORD: fair and accurate federated learning under heterogeneous targets with
ordered dropout, algorithm 1, reimplemented, without the distillation of its section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk import Trainer
from device_sdk.artifact.submodels import slice_of


class OrderedDropout(Trainer):
    """A rung of slices whose steps train it or one of the smaller ones, each as often.

    folder: of the rung's artifact.
    smaller: the rungs below it; what they hold changes.
    rng: draws which it is.
    """

    def __init__(self, folder: Path, smaller: Sequence[Trainer], rng: np.random.Generator) -> None:
        super().__init__(folder, providers="cpu")
        self._smaller, self._draws = smaller, rng

    def step(
        self, batch: Mapping[str, NDArray[Any]], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """Train the first units of each layer, as many as drawn."""
        drawn = int(self._draws.integers(len(self._smaller) + 1))
        if drawn == len(self._smaller):
            return super().step(batch, hyper=hyper)
        part, values = self._smaller[drawn], self.parameters
        submodel = part.artifact.submodel
        assert submodel is not None
        own = part.parameters
        places: dict[str, Any] = {
            name: slice_of(value.shape, values[name].shape, submodel.pieces[name].blocks)
            if name in submodel.pieces
            else ...
            for name, value in own.items()
        }
        part.set_parameters({name: values[name][at] for name, at in places.items()})
        loss = part.step(batch, hyper=hyper)
        for name, value in part.parameters.items():
            values[name][places[name]] = value
        self.set_parameters(values)
        return loss
