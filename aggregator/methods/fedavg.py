"""The aggregator's half of federated averaging: the mean of what devices' training moved.

Methods: FedAvg and FedSGD (McMahan et al. 2017, algorithm 1), FedProx, FedPer (what stays on the
devices is not here at all) and adaptive server optimizers (Reddi et al. 2021, Adaptive federated
optimization, algorithm 2: the mean difference, negated, is the server's gradient).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.limits import Measured, UpdateLimits, clip_factor, euclidean_norm, measured
from aggregator.methods.method import LOSSES, Binding, Method, Refused, RoundSummary, Said
from aggregator.methods.model import Arrays, fitted
from aggregator.methods.robust import (
    MOST_HELD_BYTES,
    HeldVectors,
    Multiple,
    Robust,
    RobustRule,
    TrimShare,
    Waiting,
    require_same_rule,
)
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import STAGES, Stage
from device_sdk.fields import Within, require_declared
from device_sdk.methods.fedavg.contract import FedAvgTraining, SharedTensor, shared_tensors
from device_sdk.methods.state import COUNT, Entry, Schema, Stateful, counters
from device_sdk.wire.arrays.exchange import Broadcast, Update

# A weighted mean of vectors that arrive one after another.


class WeightedMean(Stateful):
    """Sums in float64, so that a hundred thousand float32 vectors keep their small entries."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, dtype=np.float64)
        self._weight = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        """The number of vectors."""
        return self._count

    @property
    def weight(self) -> float:
        """Their weights' sum."""
        return self._weight

    def add(self, values: NDArray[np.float32], weight: float) -> None:
        """Add one vector, float32 [size], with a weight above 0."""
        self._sum += values.astype(np.float64) * weight
        self._weight += weight
        self._count += 1

    def mean(self) -> NDArray[np.float32]:
        """float32 [size]; zeros before the first vector."""
        if self._count == 0:
            return np.zeros(len(self._sum), dtype=np.float32)
        return (self._sum / self._weight).astype(np.float32)

    def _schema(self) -> Schema:
        size = (len(self._sum),)
        return {"sum": Entry(np.float64, size), "weight": Entry(np.float64), "count": COUNT}


Floats = NDArray[np.float32]
# Far above any difference of a model that trains, far below what could overflow a sum of them.
_LARGEST_VALUE = 1e12
_SAMPLE_COUNTS = Within(1, 1 << 40)
_VARIANCE = "running_var"
"""What torch calls a buffer that no honest device takes below 0."""
_BUFFERS, _SAMPLES = 0, 1


@dataclass(frozen=True, slots=True)
class FedAvgSettings:
    """Settings of a task of federated averaging.

    Attributes:
        optimizer: of the server, on the mean difference; plain at a rate of 1 is FedAvg.
        clip_norm: an update whose parameters moved further (Euclidean) is scaled down to it; 0 for
            no limit.
        clip_multiple: likewise for more than so many times the fleet's median norm, and so for the
            buffers, by themselves; 0 for no limit. See
            :class:`~aggregator.methods.limits.FleetScale`.
        outlier_multiple: an update more than so many times as large as the running median counts
            for nothing; see :class:`~aggregator.methods.limits.Outliers`. 0: none does.
        robust, trim_share: how a coordinate's values become one; see
            :class:`~aggregator.methods.robust.RobustRule`. All but ``none`` keep a round's updates
            in memory until it closes, and count every device alike, whatever samples it claims.
        most_samples: a device that claims more samples weighs as much as one with so many; 0 for no
            limit.
        samples_multiple: likewise for more than so many times the fleet's median claim; 0 for no
            limit.
        training: what the broadcast tells the devices.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(name="plain", learning_rate=1.0)
    )
    clip_norm: Annotated[float, Within(0)] = 0.0
    clip_multiple: Multiple = 3.0
    outlier_multiple: Multiple = 0.0
    robust: Robust = "none"
    trim_share: TrimShare = 0.1
    most_samples: Annotated[int, Within(0)] = 0
    samples_multiple: Multiple = 3.0
    training: FedAvgTraining = field(default_factory=FedAvgTraining)

    def __post_init__(self) -> None:
        require_declared(self)


class FedAvgMethod(Stateful, Method):
    """Keeps the global model and moves it by the devices' mean difference.

    Args:
        parameters: the first model, by torch's names, as an artifact's ``initial`` holds them.
        buffers: likewise; float buffers (batch norm's statistics) are averaged, others left out.
        settings: of the task.

    Raises ValueError where there is nothing to share or a value is not finite.
    """

    PARTS = ("mean", "optimizer", "limits", "held", "waiting")

    def __init__(
        self,
        parameters: Mapping[str, NDArray[Any]],
        buffers: Mapping[str, NDArray[Any]] | None = None,
        settings: FedAvgSettings | None = None,
    ) -> None:
        self._settings = settings if settings is not None else FedAvgSettings()
        kept = self._settings.training.personal_names
        self._layout = shared_tensors(parameters, buffers or {}, kept)
        # Personal layers and counts of batches: of the model, and the devices' own.
        self._unshared = {*parameters, *(buffers or {})} - {one.name for one in self._layout}
        first = {**(buffers or {}), **parameters}
        self._model = _flat(self._layout, {one.wire_name: first[one.name] for one in self._layout})
        if not np.isfinite(self._model).all():
            raise ValueError("the first model holds values that are not finite")
        self._trained = sum(one.size for one in self._layout if one.kind == "parameter")
        self._optimizer = ServerOptimizer(self._settings.optimizer, (1, self._trained))
        self._rule = RobustRule(self._settings.robust, self._settings.trim_share)
        chosen = self._settings
        self._limits = UpdateLimits(
            chosen.clip_norm,
            chosen.clip_multiple,
            outlier_multiple=chosen.outlier_multiple,
            length=euclidean_norm(self._model[: self._trained]),
            others=2 if chosen.clip_multiple or chosen.samples_multiple else 0,
        )
        self._buffers_length = euclidean_norm(self._model[self._trained :])
        self._variances = np.concatenate(
            [np.full(one.size, one.name.endswith(_VARIANCE)) for one in self._layout]
        )
        self._clear()

    @property
    def model(self) -> dict[str, Floats]:
        """The global model's shared parameters and float buffers by torch's names: copies."""
        return {
            one.name: part.reshape(one.shape).copy()
            for one, part in zip(self._layout, self._parts(), strict=True)
        }

    @property
    def model_arrays(self) -> dict[str, Floats]:
        """As :attr:`model`: what devices share, without their personal layers."""
        return self.model

    def begin_with(self, model: Arrays) -> None:
        """Takes the shared tensors; those that devices keep to themselves may be there."""
        found = fitted({one.name: one.shape for one in self._layout}, model, self._unshared)
        self._model = np.concatenate([array.reshape(-1) for array in found.values()])
        self._optimizer = ServerOptimizer(self._settings.optimizer, (1, self._trained))
        self._clear()

    def open_round(self, round_id: int) -> Broadcast:
        """The broadcast holds the model and the devices' training settings.

        The model's tensors are named by :mod:`device_sdk.methods.fedavg.contract`.
        """
        self._begin(round_id)
        self._clear()
        return Broadcast(
            round_id=round_id,
            version=self._version,
            tensors={
                one.wire_name: part.reshape(one.wire_shape).copy()
                for one, part in zip(self._layout, self._parts(), strict=True)
            },
            settings=self._settings.training.as_scalars(),
        )

    def check(self, update: Update) -> None:
        """Refuses with reason ``bad-round``, ``bad-tensors``, ``bad-metadata``,
        ``bad-values`` or, where updates are held, ``round-full``."""
        self._require_round(update)
        if set(update.tensors) != {one.wire_name for one in self._layout}:
            raise Refused("bad-tensors", "the update's tensors are not those of the model")
        self._check_metadata(update)
        if self._held.nbytes > MOST_HELD_BYTES:
            raise Refused("round-full", "this round holds as many updates as memory is set aside")
        for one in self._layout:
            values = update.tensors[one.wire_name]
            if values.dtype != np.float32 or values.shape != one.wire_shape:
                raise Refused(
                    "bad-values",
                    f"{one.wire_name} is {values.dtype} {values.shape}; expected float32 "
                    f"{one.wire_shape}",
                )
            # NaN fails the comparison too.
            if values.size and not float(np.abs(values).max()) <= _LARGEST_VALUE:
                raise Refused("bad-values", "a value is not finite or is absurdly large")

    def absorb(self, update: Update) -> None:
        """Adds the difference, unless it is an outlier; ``update`` must have passed ``check``.

        The first updates of a task's life wait until three devices' norms are known, or the round
        closes: whoever comes first is judged by those who come next.
        """
        values = _flat(self._layout, update.tensors)
        # As one row: a model has none that could be compared.
        parameters, buffers = values[None, : self._trained], values[self._trained :]
        found = measured(parameters)
        self._limits.note(update.sender, found, (euclidean_norm(buffers), self._samples(update)))
        if not (self._limits.known or self._waiting.full):
            self._waiting.add(update)
            return
        self._add_waiting()
        self._add(update, values, found)

    def _add_waiting(self) -> None:
        for waited in self._waiting.take():
            values = _flat(self._layout, waited.tensors)
            self._add(waited, values, measured(values[None, : self._trained]))

    def _add(self, update: Update, values: Floats, found: Measured) -> None:
        self._loss += float(update.metadata["loss"])
        values = self._honest_variances(values)
        weight = self._weight(update)
        # What weighs more may move less far: it is the product that moves the model.
        heavier = weight / (self._limits.usual(_SAMPLES) or weight)
        _, factor = self._limits.apply(values[None, : self._trained], found, heavier)
        if factor == 0:
            return
        if factor < 1:
            values = values * np.float32(factor)
            self._clipped += 1
        values = self._bounded_buffers(values)
        if self._rule.holds:
            self._held.add(values)
        else:
            self._mean.add(values, weight)

    def close_round(self) -> RoundSummary:
        """Metrics: ``clipped`` updates, ``outliers`` with ``outlier_multiple``, mean ``loss`` of
        the devices, ``update_norm`` of the mean difference and the ``weight`` behind it: samples
        or devices."""
        self._add_waiting()
        kept = len(self._held) + self._mean.count
        metrics = {"clipped": float(self._clipped), **self._limits.metrics()}
        participants = kept + int(metrics.get("outliers", 0))
        if participants:
            held = len(self._held) > 0
            # Without anything that is kept, the mean is of no difference at all.
            difference = self._held.mean(self._rule) if held else self._mean.mean()
            trained = self._trained
            moved = np.empty_like(self._model)
            moved[:trained] = self._optimizer.step(
                self._model[None, :trained], -difference[None, :trained]
            )[0]
            moved[trained:] = self._model[trained:] + difference[trained:]
            if not np.isfinite(moved).all():
                raise ArithmeticError(
                    "the server's step made the model non-finite; lower the learning rate or set "
                    "clip_norm"
                )
            self._model = moved
            self._limits.settle()
            self._version += 1
            metrics["update_norm"] = float(np.linalg.norm(difference[:trained]))
            metrics["loss"] = self._loss / participants
            metrics["weight"] = float(kept) if held else self._mean.weight
        self._clear()
        return RoundSummary(self._round_id, self._version, participants, metrics)

    def _schema(self) -> Schema:
        return {
            "model": Entry(np.float32, self._model.shape),
            "counters": counters("version", "round_id", "clipped"),
            "loss": Entry(np.float64),
        }

    def _parts_follow(self) -> None:
        self._held = HeldVectors(len(self._model))
        self._waiting = Waiting()

    def _require_sound(self) -> None:
        require_same_rule(len(self._held), self._mean.count + len(self._held), self._rule)

    def _check_metadata(self, update: Update) -> None:
        said = Said(update.metadata)
        said.number("loss", LOSSES)
        if self._by_samples:
            said.integer("samples", _SAMPLE_COUNTS)
        said.end()

    @property
    def _by_samples(self) -> bool:
        return self._settings.training.weighting == "samples"

    def _samples(self, update: Update) -> float:
        return float(update.metadata["samples"]) if self._by_samples else 1.0

    def _weight(self, update: Update) -> float:
        samples, chosen = self._samples(update), self._settings
        most = float(chosen.most_samples) or math.inf
        if chosen.samples_multiple and (usual := self._limits.usual(_SAMPLES)):
            most = min(most, chosen.samples_multiple * usual)
        return min(samples, most)

    def _honest_variances(self, values: Floats) -> Floats:
        """A variance is at least 0, so that a mean of them is: below, a model has no output."""
        least = -self._model[self._variances]
        if not least.size or (values[self._variances] >= least).all():
            return values
        held = values.copy()
        held[self._variances] = np.maximum(held[self._variances], least)
        return held

    def _bounded_buffers(self, values: Floats) -> Floats:
        buffers = values[self._trained :]
        most = self._limits.most_length(_BUFFERS, self._buffers_length)
        factor = clip_factor(buffers, most) if math.isfinite(most) else 1.0
        if factor == 1:
            return values
        return np.concatenate([values[: self._trained], buffers * np.float32(factor)])

    def _parts(self) -> list[Floats]:
        ends = np.cumsum([one.size for one in self._layout])
        return np.split(self._model, ends[:-1])

    def _clear(self) -> None:
        self._mean = WeightedMean(len(self._model))
        self._parts_follow()
        self._limits.begin()
        self._clipped = 0
        self._loss = 0.0


def _flat(layout: tuple[SharedTensor, ...], tensors: Mapping[str, NDArray[Any]]) -> Floats:
    parts = [tensors[one.wire_name].astype(np.float32).reshape(-1) for one in layout]
    return np.concatenate(parts)


class FedAvgBinding(Binding[FedAvgSettings]):
    """One artifact: all devices train the same model."""

    __slots__ = ()
    settings_class = FedAvgSettings
    artifacts = range(1, 2)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Their own with layers of their own alone."""
        return STAGES if self.settings.training.personal_names else ("global",)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        """Begins with the artifact's own parameters and buffers."""
        (artifact,) = artifacts
        kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
        parameters = {n: a for n, a in artifact.initial.items() if kinds[n] == "parameter"}
        buffers = {n: a for n, a in artifact.initial.items() if kinds[n] == "buffer"}
        return FedAvgMethod(parameters, buffers, self.settings)
