"""The aggregator's half: the mean of what devices sent is the gradient of FedYogi.

FedYogi: Reddi et al. 2021, Adaptive federated optimization, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import Binding, ModelMethod, Refused
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import FlatLayout, layout_of
from device_sdk.fields import Declared, Within
from device_sdk.methods.state import Entry, Schema
from device_sdk.wire.arrays.exchange import Update
from sparse_yogi.contract import SparseTraining

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SparseYogiSettings(Declared):
    """The task file's table ``[sparse_yogi]``; ``training`` is the table below it.

    ``tau`` is the optimizer's degree of adaptivity: larger is closer to plain averaging.
    """

    learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.02
    beta1: Annotated[float, Within(0, 0.9999)] = 0.9
    beta2: Annotated[float, Within(0, 0.9999)] = 0.99
    tau: Annotated[float, Within(0, 1e3, above=True)] = 1e-3
    training: SparseTraining = field(default_factory=SparseTraining)


class SparseYogiMethod(ModelMethod):
    """Keeps one model; the sum of what devices sent of it, divided by their number, is Yogi's
    gradient."""

    ADDED = ("sum",)
    _sum: NDArray[np.float64]

    def __init__(self, initial: Floats, layout: FlatLayout, settings: SparseYogiSettings) -> None:
        self._settings = settings
        super().__init__(initial, layout, settings.training)

    def reset(self) -> None:
        """The optimizer begins anew."""
        self._first_moment = np.zeros_like(self._model)
        self._second_moment = np.full_like(self._model, self._settings.tau**2)

    def require(self, update: Update) -> None:
        """Refuses what ``add`` could not add. Whatever comes, this must not fail otherwise."""
        if update.tensors.keys() != {"places", "values"}:
            raise Refused("bad-tensors", "expected places and values")
        places, values = update.tensors["places"], update.tensors["values"]
        most = self._settings.training.kept(len(self._model))
        if places.dtype != np.int32 or places.ndim != 1 or not 0 < len(places) <= most:
            raise Refused("bad-places", f"places must be int32, 1 to {most} of them")
        if places[0] < 0 or places[-1] >= len(self._model) or (places[1:] <= places[:-1]).any():
            raise Refused("bad-places", "places must rise and lie in the model")
        if values.dtype != np.float32 or values.shape != places.shape:
            raise Refused("bad-values", "expected a float32 value for each place")
        if not np.abs(values).max() <= 1e6:
            raise Refused("bad-values", "a value is not finite, or too large")

    def add(self, update: Update) -> None:
        """All devices count the same."""
        self._sum[update.tensors["places"]] += update.tensors["values"]

    def step(self) -> Mapping[str, float]:
        """One step of Yogi along the mean."""
        told = self._settings
        gradient = (self._sum / self._participants).astype(np.float32)
        square = np.square(gradient)
        first, second = self._first_moment, self._second_moment
        first = told.beta1 * first + (1 - told.beta1) * gradient
        second = second - (1 - told.beta2) * square * np.sign(second - square)
        step = told.learning_rate * first / (np.sqrt(second) + told.tau)
        self._first_moment, self._second_moment = first, second
        self._model = (self._model + step).astype(np.float32)
        return {"gradient_norm": float(np.linalg.norm(gradient))}

    def schema(self) -> Schema:
        """What is kept, the open round's sum included."""
        size = self._model.shape
        moments = dict.fromkeys(("first_moment", "second_moment"), Entry(np.float32, size))
        return {**super().schema(), **moments, "sum": Entry(np.float64, size)}


class SparseYogiBinding(Binding[SparseYogiSettings]):
    """Joins the method to a task file."""

    settings_class = SparseYogiSettings
    artifacts = range(1, 2)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> SparseYogiMethod:
        """Begins with the artifact's own parameters."""
        layout = layout_of(artifacts[0].manifest)
        return SparseYogiMethod(layout.flatten(artifacts[0].initial), layout, self.settings)
