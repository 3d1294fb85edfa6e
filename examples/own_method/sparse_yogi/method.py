"""The aggregator's half: the mean of what devices sent is the gradient of FedYogi.

FedYogi: Reddi et al. 2021, Adaptive federated optimization, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.binding import Binding
from aggregator.methods.method import Method, Refused, RoundSummary
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import layout_of
from device_sdk.methods.state import RestoreError, State
from device_sdk.wire.arrays.exchange import Broadcast, Update, require_number
from sparse_yogi.contract import SparseTraining

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SparseYogiSettings:
    """The task file's table ``[sparse_yogi]``; ``training`` is the table below it.

    ``tau`` is the optimizer's degree of adaptivity: larger is closer to plain averaging.
    """

    learning_rate: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    training: SparseTraining = field(default_factory=SparseTraining)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "tau"):
            require_number(name, getattr(self, name), 0, 1e3, above=True)
        for name in ("beta1", "beta2"):
            require_number(name, getattr(self, name), 0, 0.9999)


class SparseYogiMethod(Method):
    """Keeps one model as a vector, float32 [p]."""

    def __init__(self, initial: Floats, settings: SparseYogiSettings) -> None:
        self._settings = settings
        self._model = initial.astype(np.float32)
        self._first = np.zeros_like(self._model)
        self._second = np.full_like(self._model, settings.tau**2)
        self._sum = np.zeros(len(initial))
        self._round_id = self._version = self._participants = 0

    @property
    def model(self) -> Floats:
        """The newest version, [p]: a copy."""
        return self._model.copy()

    def open_round(self, round_id: int) -> Broadcast:
        """The model, for every device."""
        self._round_id, self._participants = round_id, 0
        self._sum[:] = 0
        settings = self._settings.training.as_scalars()
        return Broadcast(round_id, self._version, {"model": self._model.copy()}, settings)

    def check(self, update: Update) -> None:
        """Refuses what ``absorb`` could not add. Whatever comes, this must not fail otherwise."""
        if update.round_id != self._round_id:
            raise Refused("bad-round", f"the update is of round {update.round_id}")
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
        if not np.isfinite(values).all() or np.abs(values).max() > 1e6:
            raise Refused("bad-values", "a value is not finite, or too large")

    def absorb(self, update: Update) -> None:
        """All devices count the same."""
        self._sum[update.tensors["places"]] += update.tensors["values"]
        self._participants += 1

    def close_round(self) -> RoundSummary:
        """One step of Yogi; without updates the version stays."""
        participants, self._participants = self._participants, 0
        if participants:
            told = self._settings
            gradient = (self._sum / participants).astype(np.float32)
            square = np.square(gradient)
            self._first = told.beta1 * self._first + (1 - told.beta1) * gradient
            self._second = self._second - (1 - told.beta2) * square * np.sign(self._second - square)
            step = told.learning_rate * self._first / (np.sqrt(self._second) + told.tau)
            self._model = (self._model + step).astype(np.float32)
            self._version += 1
            self._sum[:] = 0
        return RoundSummary(self._round_id, self._version, participants)

    def state(self) -> State:
        """Everything, the open round's sum included."""
        counts = [self._round_id, self._version, self._participants]
        return {
            "model": self._model.copy(),
            "first_moment": self._first.copy(),
            "second_moment": self._second.copy(),
            "sum": self._sum.copy(),
            "counts": np.asarray(counts, np.int64),
        }

    def restore(self, state: State) -> None:
        """Raises RestoreError where names, dtypes or shapes do not fit."""
        own = self.state()
        fits = own.keys() == state.keys() and all(
            (state[name].dtype, state[name].shape) == (array.dtype, array.shape)
            for name, array in own.items()
        )
        if not fits or state["counts"].min() < 0:
            raise RestoreError(f"the state holds {sorted(state)}, or of another model")
        self._model, self._sum = state["model"].copy(), state["sum"].copy()
        self._first, self._second = state["first_moment"].copy(), state["second_moment"].copy()
        self._round_id, self._version, self._participants = state["counts"].tolist()


class SparseYogiBinding(Binding[SparseYogiSettings]):
    """Joins the method to a task file."""

    settings_class = SparseYogiSettings
    artifacts = range(1, 2)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> SparseYogiMethod:
        """Begins with the artifact's own parameters."""
        (artifact,) = artifacts
        initial = layout_of(artifact.manifest).flatten(artifact.initial)
        return SparseYogiMethod(initial, self.settings)
