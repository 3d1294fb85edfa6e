"""The aggregator's half of federated averaging: the mean of what devices' training moved.

Methods: FedAvg and FedSGD (McMahan et al. 2017, algorithm 1), FedProx, FedPer (what stays on the
devices is not here at all) and adaptive server optimizers (Reddi et al. 2021, Adaptive federated
optimization, algorithm 2: the mean difference, negated, is the server's gradient).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.limits import (
    MOST_MEDIANS,
    Measured,
    UpdateLimits,
    clip_factor,
    euclidean_norm,
    measured,
)
from aggregator.methods.method import (
    LOSSES,
    Binding,
    NoVersion,
    Refused,
    RoundSummary,
    Said,
)
from aggregator.methods.model import Arrays, ModelMismatch, fitted
from aggregator.methods.robust import (
    MOST_HELD_BYTES,
    HeldUpdates,
    Multiple,
    Robust,
    RobustRule,
    TrimShare,
)
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from aggregator.methods.summing import SummingMethod
from aggregator.methods.sums import (
    MOST_UPDATES,
    FixedPointSum,
    UnlikeSum,
)
from device_sdk.artifact import Artifact
from device_sdk.fields import Within, require_declared
from device_sdk.methods.fedavg.contract import (
    FedAvgTraining,
    SharedTensor,
    exact_names,
    shared_tensors,
)
from device_sdk.methods.state import Entry, Schema, counters
from device_sdk.wire.arrays.exchange import Broadcast, Update

Floats = NDArray[np.float32]
# Far above any difference of a model that trains, far below what could overflow a sum of them.
_LARGEST_VALUE = 1e12
_SAMPLE_COUNTS = Within(1, 1 << 40)
_VARIANCE = "running_var"
"""What torch calls a buffer that no honest device takes below 0."""
_BUFFERS, _SAMPLES = 0, 1
_MOST_WEIGHT = 1 << 38
"""A device's: so much from each of 2^24 stays within 2^62."""
_LOSS_UNITS, _LOSS_LIMB = 1 << 30, 1 << 32
"""Losses are summed in units of 2^-30, as whole numbers in two parts: a high and a low one."""


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


class FedAvgMethod(SummingMethod):
    """Keeps the global model and moves it by the devices' mean difference.

    Args:
        parameters: the first model, by torch's names, as an artifact's ``initial`` holds them.
        buffers: likewise; float buffers (batch norm's statistics) are averaged, others left out.
        settings: of the task.
        frozen: names among them of what no step moves: devices have it from the artifact, and it
            travels no more.

    A round adds up unless a ``robust`` rule needs all of its updates at once, or too little is
    known of the fleet to judge them: in a task's first round, and while fewer than three devices
    were heard of. What does not add up is held, and judged by itself when the round closes.

    Raises ValueError where there is nothing to share or a value is not finite.
    """

    PARTS = ("optimizer", "limits", "held", "moved", "buffers_moved")
    COUNTED = "kept"
    ADDED = ("kept", "clipped", "fewer", "weight_sum", "losses")

    def __init__(
        self,
        parameters: Mapping[str, NDArray[Any]],
        buffers: Mapping[str, NDArray[Any]] | None = None,
        settings: FedAvgSettings | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self._settings = settings if settings is not None else FedAvgSettings()
        kept = self._settings.training.personal_names
        self._layout = shared_tensors(parameters, buffers or {}, kept, frozen)
        # Personal layers and counts of batches: of the model, and the devices' own.
        self._unshared = {*parameters, *(buffers or {})} - {one.name for one in self._layout}
        first = {**(buffers or {}), **parameters}
        self._frozen = {name: first[name] for name in first if name in frozen}
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
            others=2,
        )
        self._buffers_length = euclidean_norm(self._model[self._trained :])
        self._variances = np.concatenate(
            [np.full(one.size, one.name.endswith(_VARIANCE)) for one in self._layout]
        )
        self._adds_up = 0
        self._moved: FixedPointSum | None = None
        self._buffers_moved: UnlikeSum | None = None
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
        """Takes the shared tensors; those that devices keep to themselves may be there, and frozen
        ones as they are in the artifact."""
        frozen = [name for name in model if name in self._frozen]
        other = [name for name in frozen if not np.array_equal(model[name], self._frozen[name])]
        if other:
            raise ModelMismatch(
                f"{other[0]!r} is frozen, and devices have it from the artifact, which has other "
                "values of it: export the artifact from this model"
            )
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
        if self._limits.known and not self._rule.holds:
            self._adds_up = 1
            self._bounds_follow()
            self._moved = FixedPointSum((self._trained,), self._bound)
            self._buffers_moved = UnlikeSum((self._untrained,), self._buffers_bound)
        return Broadcast(
            round_id=round_id,
            version=self._version,
            tensors={
                one.wire_name: part.reshape(one.wire_shape).copy()
                for one, part in zip(self._layout, self._parts(), strict=True)
            },
            settings=self._settings.training.as_scalars(),
            exact=exact_names(self._layout),
        )

    def check(self, update: Update) -> None:
        """Refuses with reason ``bad-round``, ``bad-tensors``, ``bad-metadata``,
        ``bad-values`` or, where updates are held, ``round-full``."""
        self._require_round(update)
        if set(update.tensors) != {one.wire_name for one in self._layout}:
            raise Refused("bad-tensors", "the update's tensors are not those of the model")
        self._check_metadata(update)
        if self.full:
            raise Refused("round-full", "this round holds as many updates as memory is set aside")
        weight = self._weight(update)
        for one in self._layout:
            values = update.tensors[one.wire_name]
            if values.dtype != np.float32 or values.shape != one.wire_shape:
                raise Refused(
                    "bad-values",
                    f"{one.wire_name} is {values.dtype} {values.shape}; expected float32 "
                    f"{one.wire_shape}",
                )
            pull = self._most_pull if one.kind == "parameter" else self._most_buffers_pull
            most = min(_LARGEST_VALUE, pull / weight)
            # NaN fails the comparison too.
            if values.size and not float(np.abs(values).max()) <= most:
                raise Refused("bad-values", "a value is not finite or is absurdly large")

    @property
    def full(self) -> bool:
        """See :class:`~aggregator.methods.method.Method`."""
        return self._held.nbytes > MOST_HELD_BYTES or self._kept >= MOST_UPDATES

    def absorb(self, update: Update) -> None:
        """Adds the difference, unless it is an outlier, or holds the update until the round closes;
        it must have passed ``check``."""
        if not self._adds_up:
            self._held.add(update)
            return
        values = _flat(self._layout, update.tensors)
        found = self._noted(update, values)
        judged = self._judged(update, values, found)
        if judged is not None:
            self._add_pull(*judged)

    def _noted(self, update: Update, values: Floats) -> Measured:
        """How large the difference is; the limits heard of it."""
        # As one row: a model has none that could be compared.
        found = measured(values[None, : self._trained])
        buffers = euclidean_norm(values[self._trained :])
        self._limits.note(update.sender, found, (buffers, float(self._samples(update))))
        return found

    def _judged(self, update: Update, values: Floats, found: Measured) -> tuple[Floats, int] | None:
        """The difference as it counts, and its weight; None where it is an outlier."""
        units = round(float(update.metadata["loss"]) * _LOSS_UNITS)
        self._losses += divmod(units, _LOSS_LIMB)
        values = self._honest_variances(values)
        weight, claimed = self._weight(update), self._samples(update)
        if weight < claimed:
            self._fewer += 1
            self.lowered[update.sender] = f"samples {claimed:,} as {weight:,}"
        # What weighs more may move less far: it is the product that moves the model.
        heavier = weight / (self._limits.usual(_SAMPLES) or weight)
        _, factor = self._limits.apply(values[None, : self._trained], found, heavier)
        if factor == 0:
            return None
        if factor < 1:
            values = values * np.float32(factor)
            self._clipped += 1
        self._kept += 1
        self._weight_sum += weight
        return self._bounded_buffers(values), weight

    def _add_pull(self, values: Floats, weight: int) -> None:
        assert self._moved is not None and self._buffers_moved is not None
        units = self._moved.array
        units += self._moved.units(values[: self._trained], weight)
        self._buffers_moved.add(values[self._trained :], weight)

    def _difference(self) -> Floats:
        """The mean of what was absorbed; what was held is judged now."""
        if not self._adds_up:
            each = [(update, _flat(self._layout, update.tensors)) for update in self._held]
            sized = [(update, values, self._noted(update, values)) for update, values in each]
            self._limits.look_again()
            judged = [one for one in (self._judged(*each) for each in sized) if one is not None]
            if self._rule.holds and judged:
                self._weight_sum = self._kept
                return self._rule.mean(np.stack([values for values, _ in judged]))
            pulls = [np.abs(values).astype(np.float64) * weight for values, weight in judged]
            own = max((float(pull[: self._trained].max()) for pull in pulls), default=0.0)
            others = max((float(p[self._trained :].max(initial=0)) for p in pulls), default=0.0)
            self._moved = FixedPointSum((self._trained,), own)
            self._buffers_moved = UnlikeSum((self._untrained,), others)
            for values, weight in judged:
                self._add_pull(values, weight)
        assert self._moved is not None and self._buffers_moved is not None
        total = np.concatenate([self._moved.value, self._buffers_moved.value])
        # Without anything that is kept, the mean is of no difference at all.
        return (total / max(1, self._weight_sum)).astype(np.float32)

    def close_round(self) -> RoundSummary:
        """Metrics: ``clipped`` updates, ``fewer_samples`` where claims of samples counted for less,
        ``outliers`` with ``outlier_multiple``, mean ``loss`` of
        the devices, ``update_norm`` of the mean difference and the ``weight`` behind it: samples
        or devices."""
        difference = self._difference()
        metrics = {"clipped": float(self._clipped), **self._limits.metrics()}
        if self._fewer:
            metrics["fewer_samples"] = float(self._fewer)
        participants = self._kept + int(metrics.get("outliers", 0))
        if participants:
            trained = self._trained
            moved = np.empty_like(self._model)
            moved[:trained] = self._optimizer.step(
                self._model[None, :trained], -difference[None, :trained]
            )[0]
            moved[trained:] = self._model[trained:] + difference[trained:]
            if not np.isfinite(moved).all():
                raise NoVersion(
                    "the server's step made the model non-finite; lower the learning rate or set "
                    "clip_norm"
                )
            self._model = moved
            self._limits.settle()
            self._version += 1
            metrics["update_norm"] = float(np.linalg.norm(difference[:trained]))
            high, low = self._losses.tolist()
            metrics["loss"] = (high * _LOSS_LIMB + low) / _LOSS_UNITS / participants
            metrics["weight"] = float(self._weight_sum)
        self._clear()
        return RoundSummary(self._round_id, self._version, participants, metrics)

    def _schema(self) -> Schema:
        return {
            "model": Entry(np.float32, self._model.shape),
            "counters": counters(
                "version", "round_id", "clipped", "fewer", "kept", "weight_sum", "adds_up"
            ),
            "losses": Entry(np.int64, (2,)),
        }

    def _parts_follow(self) -> None:
        self._held = HeldUpdates()
        sums = bool(self._adds_up)
        self._moved = FixedPointSum((self._trained,)) if sums else None
        self._buffers_moved = UnlikeSum((self._untrained,)) if sums else None

    def _require_sound(self) -> None:
        super()._require_sound()
        self._bounds_follow()

    def _bounds_follow(self) -> None:
        """How far a value times its weight may pull, and what ``check`` takes of it: where no limit
        shortens updates, a sum of integers needs one."""
        usual, heaviest = self._limits.usual(_SAMPLES), self._heaviest
        length = self._buffers_length
        self._bound = self._limits.most_pull(usual, heaviest)
        self._buffers_bound = self._limits.most_length(_BUFFERS, length) * heaviest
        self._most_pull = self._most_buffers_pull = math.inf
        if self._adds_up and math.isinf(self._bound):
            self._bound = self._most_pull = self._limits.absurd_norm * usual
        if self._adds_up and math.isinf(self._buffers_bound):
            self._most_buffers_pull = self._limits.absurd_length(_BUFFERS, length) * usual
            # A variance below 0 may be lifted by as much as the model's own.
            own = float(np.abs(self._model[self._trained :]).max(initial=0)) * heaviest
            self._buffers_bound = max(self._most_buffers_pull, own)

    def _check_metadata(self, update: Update) -> None:
        said = Said(update.metadata)
        said.number("loss", LOSSES)
        if self._by_samples:
            said.integer("samples", _SAMPLE_COUNTS)
        said.end()

    @property
    def _by_samples(self) -> bool:
        return self._settings.training.weighting == "samples"

    def _samples(self, update: Update) -> int:
        return int(update.metadata["samples"]) if self._by_samples else 1

    @property
    def _untrained(self) -> int:
        return len(self._model) - self._trained

    @property
    def _heaviest(self) -> int:
        """What no update weighs more than."""
        chosen, usual = self._settings, self._limits.usual(_SAMPLES)
        most = min(float(chosen.most_samples) or math.inf, _MOST_WEIGHT)
        if usual:
            most = min(most, (chosen.samples_multiple or MOST_MEDIANS) * usual)
        return max(1, int(most))

    def _weight(self, update: Update) -> int:
        return min(self._samples(update), self._heaviest)

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
        self._adds_up = 0
        self._parts_follow()
        self._limits.begin(self._round_id)
        self._kept = 0
        self._clipped = self._fewer = 0
        self._weight_sum = 0
        self._losses = np.zeros(2, dtype=np.int64)
        self._bounds_follow()


def _flat(layout: tuple[SharedTensor, ...], tensors: Mapping[str, NDArray[Any]]) -> Floats:
    parts = [tensors[one.wire_name].astype(np.float32).reshape(-1) for one in layout]
    return np.concatenate(parts)


class FedAvgBinding(Binding[FedAvgSettings]):
    """One artifact: all devices train the same model."""

    __slots__ = ()
    settings_class = FedAvgSettings
    artifacts = range(1, 2)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        """Begins with the artifact's own parameters and buffers."""
        (artifact,) = artifacts
        kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
        parameters = {n: a for n, a in artifact.initial.items() if kinds[n] == "parameter"}
        buffers = {n: a for n, a in artifact.initial.items() if kinds[n] == "buffer"}
        return FedAvgMethod(parameters, buffers, self.settings, artifact.manifest.frozen_members)
