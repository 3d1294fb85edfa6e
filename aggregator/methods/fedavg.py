"""The aggregator's half of federated averaging: the mean of what devices' training moved.

Methods: FedAvg and FedSGD (McMahan et al. 2017, algorithm 1), FedProx, FedPer (what stays on the
devices is not here at all) and adaptive server optimizers (Reddi et al. 2021, Adaptive federated
optimization, algorithm 2: the mean difference, negated, is the server's gradient). Whatever model a
device has to itself (``FedAvgTraining.personalise``), what it sends is the shared one's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import MOST_MEDIANS, Judged, Limits, NormBounding, Sized
from aggregator.methods.fleet import clip_factor, euclidean_norm, measured
from aggregator.methods.method import (
    LOSSES,
    Arrays,
    Binding,
    ModelMismatch,
    Refused,
    Said,
    fitted,
    late_weight,
    require_floats,
    require_within,
)
from aggregator.methods.robust import Multiple, Robust, RobustRule, TrimShare
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from aggregator.methods.submodels import (
    Ladder,
    Rung,
    Slices,
    dealt,
    rungs_of,
    trained_of,
    unit_orders,
    whole,
)
from aggregator.methods.summing import SummingMethod, finite
from aggregator.methods.sums import FixedPointSum, UnlikeSum
from device_sdk.artifact import Artifact
from device_sdk.artifact.submodels import Submodel
from device_sdk.fields import Declared, Within
from device_sdk.methods.fedavg.contract import (
    FedAvgTraining,
    deal_of,
    first_name,
    own_name,
    personal_obstacle,
    rung_name,
    shared_tensors,
)
from device_sdk.methods.state import Entry, RestoreError, Schema
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update

Floats = NDArray[np.float32]
# Far above any difference of a model that trains, far below what could overflow a sum of them.
_LARGEST_VALUE = 1e12
_SAMPLE_COUNTS = Within(1, 1 << 40)
_BUFFERS, _SAMPLES = 0, 1
_MOST_WEIGHT = 1 << 38
"""A device's: so much from each of 2^24 stays within 2^62."""
_LOSS_UNITS, _LIMB = 1 << 30, 1 << 32
"""Losses are summed in units of 2^-30, as whole numbers in two parts: a high and a low one."""


@dataclass(frozen=True, slots=True)
class FedAvgSettings(Declared):
    """Settings of a task of federated averaging.

    Attributes:
        optimizer: of the server, on the mean difference; plain at a rate of 1 is FedAvg.
        clip_norm: an update whose parameters moved further (Euclidean) is scaled down to it; 0 for
            no limit.
        clip_multiple: likewise for more than so many times the fleet's median norm, and so for the
            buffers, by themselves; 0 for no limit. See
            :class:`~aggregator.methods.fleet.FleetScale`.
        outlier_multiple: an update more than so many times as large as the running median counts
            for nothing; see :class:`~aggregator.methods.fleet.Outliers`. 0: none does.
        robust, trim_share: how a coordinate's values become one; see
            :class:`~aggregator.methods.robust.RobustRule`. All but ``none`` keep a round's updates
            in memory until it closes, and count every device alike, whatever samples it claims.
        most_samples: a device that claims more samples weighs as much as one with so many; 0 for no
            limit.
        samples_multiple: likewise for more than so many times the fleet's median claim; 0 for no
            limit.
        slices: of a ladder of widths, which units of the width a rung has; see
            :func:`~aggregator.methods.submodels.unit_orders`.
        deals: with ``dealt``, how many different slices of a size a round has.
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
    slices: Slices = "static"
    deals: Annotated[int, Within(1, 64)] = 4
    training: FedAvgTraining = field(default_factory=FedAvgTraining)


class FedAvgMethod(SummingMethod):
    """Keeps the global model and moves it by the devices' mean difference.

    Args:
        parameters: the first model, by torch's names, as an artifact's ``initial`` holds them.
        buffers: likewise; float buffers (batch norm's statistics) are averaged, others left out.
        settings: of the task.
        frozen: names among them of what no step moves: devices have it from the artifact, and it
            travels no more.
        rungs: the submodels that devices train, smallest first; None where all train the whole
            model.

    Raises ValueError where there is nothing to share or a value is not finite.
    """

    TAKES_LATE = True
    PARTS = ("optimizer", "moved", "buffers_moved")
    ADDED = ("weights", "losses")
    _weights: NDArray[np.int64]
    _losses: NDArray[np.int64]
    _robust: Floats | None
    _moved: FixedPointSum | None = None
    _buffers_moved: UnlikeSum | None = None

    def __init__(
        self,
        parameters: Mapping[str, NDArray[Any]],
        buffers: Mapping[str, NDArray[Any]] | None = None,
        settings: FedAvgSettings | None = None,
        frozen: Collection[str] = (),
        rungs: Sequence[Rung] = (),
    ) -> None:
        self._settings = chosen = settings if settings is not None else FedAvgSettings()
        kept = chosen.training.personal_names
        self._layout = shared_tensors(parameters, buffers or {}, kept, frozen)
        # Personal layers and counts of batches: of the model, and the devices' own.
        self._unshared = {*parameters, *(buffers or {})} - {one.name for one in self._layout}
        first = {**(buffers or {}), **parameters}
        self._frozen = {name: first[name] for name in first if name in frozen}
        self._model = np.concatenate(
            [first[one.name].astype(np.float32).reshape(-1) for one in self._layout]
        )
        if not np.isfinite(self._model).all():
            raise ValueError("the first model holds values that are not finite")
        self._trained = sum(one.size for one in self._layout if one.kind == "parameter")
        self._deals = chosen.deals if chosen.slices == "dealt" else 1
        if chosen.slices != "static":
            _require_movable(rungs, chosen)
            rungs = dealt(rungs, self._deals) if self._deals > 1 else rungs
        _require_lasting(rungs, chosen)
        self._ladder = Ladder(self._layout, rungs or [whole(self._layout)])
        self._units = self._ladder.rungs[-1].submodel.units
        self._places: dict[int, list[int]] = {}
        for place, rung in enumerate(self._ladder.rungs):
            self._places.setdefault(rung.submodel.rung, []).append(place)
        self._cut(self._version)
        self._optimizer = ServerOptimizer(chosen.optimizer, (1, self._trained))
        self._rule = RobustRule(chosen.robust, chosen.trim_share)
        multiples = chosen.clip_multiple, 0.0, chosen.outlier_multiple
        self._bounding = NormBounding(
            Limits(chosen.clip_norm, *multiples),
            length=euclidean_norm(self._model[: self._trained]),
            others=2,
        )
        self._buffers_length = euclidean_norm(self._model[self._trained :])
        self.begin(0)

    @property
    def model(self) -> dict[str, Floats]:
        """The global model's shared parameters and float buffers by torch's names: copies."""
        return {name: each.copy() for name, each in self._ladder.tensors(self._model).items()}

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
        self._cut(self._version)
        self._optimizer = ServerOptimizer(self._settings.optimizer, (1, self._trained))
        self.begin(self._round_id)

    def _cut(self, version: int) -> None:
        """The model is another one, of this version: cut its submodels."""
        self._bases = self._ladder.bases_of(self._model)
        kind = self._settings.slices
        ranks = kind == "ranked"
        strengths = self._ladder.strengths(self._model) if ranks else np.empty(0)
        self._orders = unit_orders(kind, self._units, self._deals, version, strengths)
        self._take_parts()

    def _take_parts(self) -> None:
        self._ladder = self._ladder.cut_by(self._bases, self._orders)
        rungs = range(len(self._ladder.rungs))
        self._parts = [self._ladder.part(self._model, rung) for rung in rungs]

    def tell(self) -> Broadcast:
        """The model and the devices' training settings. Tensors are named by
        :mod:`device_sdk.methods.fedavg.contract`; of several submodels each is an attachment."""
        told = [
            Attachment(
                {one.wire_name: part.reshape(one.wire_shape) for one, _, part in rung.split(values)}
                | self._ladder.held(self._model, place),
                exact=self._ladder.exact(place),
                lasting=True,
            )
            for place, (rung, values) in enumerate(
                zip(self._ladder.rungs, self._parts, strict=True)
            )
        ]
        settings = self._settings.training.as_scalars()
        if len(told) == 1:
            (only,) = told
            return Broadcast(
                self._round_id, self._version, only.tensors, settings, exact=only.exact
            )
        attached = {}
        for rung, each in zip(self._ladder.rungs, told, strict=True):
            attached[rung_name(rung.submodel.rung, rung.deal)] = each
            # Exact, so that they stay the same content, which a device fetches once.
            for name_of, values in ((own_name, rung.own), (first_name, rung.first)):
                if values:
                    each = Attachment(values, exact=frozenset(values), lasting=True)
                    attached[name_of(rung.submodel.rung)] = each
        return Broadcast(self._round_id, self._version, {}, settings, attached)

    def require(self, update: Update) -> None:
        """Refuses with reason ``bad-tensors``, ``bad-metadata`` or ``bad-values``."""
        said = Said(update.metadata)
        said.number("loss", LOSSES)
        if self._by_samples:
            said.integer("samples", _SAMPLE_COUNTS)
        if len(self._ladder.rungs) > 1 and said.integer("rung") not in self._places:
            raise Refused("bad-metadata", "rung is none of the task's")
        said.end()
        rung = self._ladder.rungs[self._rung(update)]
        if set(update.tensors) != rung.names:
            raise Refused("bad-tensors", "the update's tensors are not those of the model")
        weight = self._weight(update)
        for one, piece in zip(rung.layout, rung.pieces, strict=True):
            pull = self._most_pull if one.kind == "parameter" else self._most_buffers_pull
            most = min(_LARGEST_VALUE, pull / weight)
            values = update.tensors[one.wire_name]
            require_floats(one.wire_name, values, one.wire_shape)
            require_within(self._ladder.moved(piece, values), most)

    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        for update in updates:
            rung = self._ladder.rungs[self._rung(update)]
            parts = [
                self._ladder.moved(piece, update.tensors[one.wire_name]).reshape(-1)
                for one, piece in zip(rung.layout, rung.pieces, strict=True)
            ]
            values = np.concatenate(parts)
            buffers = euclidean_norm(values[rung.trained :])
            # As one row: a model has none that could be compared.
            found = measured(values[None, : rung.trained])
            weight = self._weight(update)
            yield [
                Sized(
                    update,
                    values=self._honest_variances(update, values)[None],
                    found=found,
                    others=(buffers, float(self._samples(update))),
                    weight=weight / (self._bounding.usual(_SAMPLES) or weight),
                )
            ]

    def begin_sums(self) -> None:
        self._moved = FixedPointSum((self._ladder.parameters[-1].stop,), self._bound)
        self._buffers_moved = UnlikeSum((self._ladder.buffers[-1].stop,), self._buffers_bound)

    def sum_up(self, judged: Sequence[Judged]) -> None:
        for one in self._weighed(judged):
            self._add_pull(*one)

    def _add_pull(self, rung: int, values: Floats, weight: int) -> None:
        assert self._moved is not None and self._buffers_moved is not None
        self._weights[rung] += weight
        trained = self._ladder.rungs[rung].trained
        self._moved.add_at(self._ladder.parameters[rung], values[:trained], weight)
        self._buffers_moved.add_at(self._ladder.buffers[rung], values[trained:], weight)

    def sum_held(self, judged: Iterable[Judged], largest: float) -> None:
        counted = list(self._weighed(judged))
        if self._rule.holds and counted:
            moves = [(rung, values) for rung, values, _ in counted]
            self._robust = self._ladder.robust_mean(moves, self._rule)
            for rung, _, _ in counted:
                self._weights[rung] += 1
            return
        self._bound = self._buffers_bound = 0.0
        for rung, values, weight in counted:
            pull, trained = (
                np.abs(values).astype(np.float64) * weight,
                self._ladder.rungs[rung].trained,
            )
            self._bound = max(self._bound, float(pull[:trained].max()))
            self._buffers_bound = max(self._buffers_bound, float(pull[trained:].max(initial=0)))
        self.begin_sums()
        for one in counted:
            self._add_pull(*one)

    def _weighed(self, judged: Iterable[Judged]) -> Iterator[tuple[int, Floats, int]]:
        """Rung, what counts, [the rung's size], and weight of each but outliers; of all the
        losses."""
        for one in judged:
            self._losses += divmod(round(float(one.update.metadata["loss"]) * _LOSS_UNITS), _LIMB)
            weight, claimed = self._weight(one.update), self._samples(one.update)
            if weight < claimed:
                self._bounding.lower(one.update.sender, f"samples {claimed:,} as {weight:,}")
            if one.factor:
                rung = self._rung(one.update)
                values = self._bounded_buffers(rung, one.values[0])
                if one.update.age:
                    values = values * np.float32(late_weight(one.update.age))
                yield rung, values, weight

    def step(self) -> Mapping[str, float]:
        """McMahan's mean, and the optimizer's step along it. Figures: mean ``loss`` of the devices,
        ``update_norm`` of the mean difference and the ``weight`` behind it: samples or devices."""
        difference = self._mean()
        trained = self._trained
        before, gradient = self._model[None, :trained], -difference[None, :trained]
        stepped = self._optimizer.step(before, gradient)[0]
        buffers = self._model[trained:] + difference[trained:]
        self._model = finite("model", np.concatenate([stepped, buffers]))
        self._cut(self._version + 1)
        high, low = self._losses.tolist()
        return {
            "update_norm": float(np.linalg.norm(difference[:trained])),
            "loss": (high * _LIMB + low) / _LOSS_UNITS / self._participants,
            "weight": float(self._weights.sum()),
        }

    def _mean(self) -> Floats:
        if self._robust is not None:
            return self._robust
        return self._ladder.mean(self._sum_of, self._weights.tolist())

    def _sum_of(self, rung: int, at: slice) -> NDArray[np.float64]:
        """A tensor's place in a rung's vector: parameters come before buffers."""
        assert self._moved is not None and self._buffers_moved is not None
        trained = self._ladder.rungs[rung].trained
        if at.start < trained:
            begin = self._ladder.parameters[rung].start
            return self._moved.value_at(slice(begin + at.start, begin + at.stop))
        begin = self._ladder.buffers[rung].start - trained
        return self._buffers_moved.value_at(slice(begin + at.start, begin + at.stop))

    def schema(self) -> Schema:
        return {
            "model": Entry(np.float32, self._model.shape),
            "bases": Entry(np.float32, (self._ladder.basis_size,)),
            "orders": Entry(np.int64, (self._deals, self._units), least=0),
            "weights": Entry(np.int64, (len(self._ladder.rungs),), least=0),
            "losses": Entry(np.int64, (2,)),
        }

    def _parts_follow(self) -> None:
        self._robust = None
        self._moved = self._buffers_moved = None
        if self._adds_up:
            self._moved = FixedPointSum((self._ladder.parameters[-1].stop,))
            self._buffers_moved = UnlikeSum((self._ladder.buffers[-1].stop,))

    def _require_sound(self) -> None:
        super()._require_sound()
        if (np.sort(self._orders) != np.arange(self._units)).any():
            raise RestoreError("the state's orders are none of the width's units")
        self._take_parts()

    def follow(self) -> None:
        """How far a value times its weight may pull, and what ``require`` takes of it: where no
        limit shortens updates, a sum of integers needs one."""
        usual, heaviest = self._bounding.usual(_SAMPLES), self._heaviest
        length = self._buffers_length
        self._bound = self._bounding.most_pull(usual, heaviest)
        self._buffers_bound = self._bounding.most_length(_BUFFERS, length) * heaviest
        self._most_pull = self._most_buffers_pull = math.inf
        if self._adds_up and math.isinf(self._bound):
            self._bound = self._most_pull = self._bounding.absurd_norm * usual
        if self._adds_up and math.isinf(self._buffers_bound):
            self._most_buffers_pull = self._bounding.absurd_length(_BUFFERS, length) * usual
            # A variance below 0 may be lifted by as much as the model's own.
            own = float(np.abs(self._model[self._trained :]).max(initial=0)) * heaviest
            self._buffers_bound = max(self._most_buffers_pull, own)

    @property
    def _by_samples(self) -> bool:
        return self._settings.training.weighting == "samples"

    def _samples(self, update: Update) -> int:
        return int(update.metadata["samples"]) if self._by_samples else 1

    def _rung(self, update: Update) -> int:
        """Its place among the task's."""
        if len(self._places) == 1:
            return 0
        places = self._places[int(update.metadata["rung"])]
        return places[deal_of(update.round_id, update.sender, len(places))]

    @property
    def _heaviest(self) -> int:
        """What no update weighs more than."""
        chosen, usual = self._settings, self._bounding.usual(_SAMPLES)
        most = min(float(chosen.most_samples) or math.inf, _MOST_WEIGHT)
        if usual:
            most = min(most, (chosen.samples_multiple or MOST_MEDIANS) * usual)
        return max(1, int(most))

    def _weight(self, update: Update) -> int:
        return min(self._samples(update), self._heaviest)

    def _honest_variances(self, update: Update, values: Floats) -> Floats:
        """A variance is at least 0, so that a mean of them is: below, a model has no output."""
        place = self._rung(update)
        rung, own = self._ladder.rungs[place], self._parts[place]
        if not rung.variances.any():
            return values
        least = -own[rung.variances]
        if (values[rung.variances] >= least).all():
            return values
        held = values.copy()
        held[rung.variances] = np.maximum(held[rung.variances], least)
        return held

    def _bounded_buffers(self, rung: int, values: Floats) -> Floats:
        trained = self._ladder.rungs[rung].trained
        buffers = values[trained:]
        most = self._bounding.most_length(_BUFFERS, self._buffers_length)
        factor = clip_factor(buffers, most) if math.isfinite(most) else 1.0
        if factor == 1:
            return values
        return np.concatenate([values[:trained], buffers * np.float32(factor)])


def _require_movable(rungs: Sequence[Rung], settings: FedAvgSettings) -> None:
    """Raises ValueError where slices have to stay where they are."""
    kind, training = settings.slices, settings.training
    if not any(rung.submodel.kept < rung.submodel.units for rung in rungs):
        raise ValueError(
            f"slices is {kind!r}, and no rung of the model has slices that may lie anywhere: "
            "export a ladder by widths=, whose layers shrink in proportion and need no order of "
            "their units (heads, groups of channels), or leave slices at 'static'"
        )
    if training.personal_names:
        raise ValueError(
            f"slices is {kind!r}, and {training.personal_names[0]!r} is personal: the units that a "
            "personal layer stands on would be others each round; leave slices at 'static'"
        )


def _require_lasting(rungs: Sequence[Rung], settings: FedAvgSettings) -> None:
    """Raises ValueError where devices keep momenta, or a model of their own, of what is another
    part each round."""
    training = settings.training
    if training.personalise != "fine-tuned":
        keep = "a model of their own"
        instead = "training.personalise to 'fine-tuned'"
    elif training.optimizer_state == "kept":
        keep, instead = "momenta", "training.optimizer_state to 'fresh'"
    else:
        return
    if settings.slices != "static":
        raise ValueError(
            f"slices is {settings.slices!r}, and devices keep {keep}, which would be of other "
            f"units each round: set {instead}, or leave slices at 'static'"
        )
    if any(piece.role != "slice" for rung in rungs for piece in rung.pieces):
        raise ValueError(
            f"rungs have a low rank, and devices keep {keep}, which would be of other directions "
            f"each round: set {instead}, or export a ladder by widths="
        )


class FedAvgBinding(Binding[FedAvgSettings]):
    """All devices train one model: the task's artifact, or of a ladder each a part of it."""

    __slots__ = ()
    settings_class = FedAvgSettings
    one_model = True

    def why_no_staleness(self, ladder: Sequence[Submodel] = ()) -> str:
        """Differences add up whatever version they began at, as long as they are of the same
        numbers."""
        settings = self.settings
        if settings.robust != "none":
            return (
                f"{self.method_name}.robust is {settings.robust!r}, which counts every update "
                "alike: set it to 'none'"
            )
        if settings.slices != "static":
            return (
                f"{self.method_name}.slices is {settings.slices!r}, so a rung's slices are of "
                "other units in each version: leave it at 'static'"
            )
        if any(piece.role != "slice" for rung in ladder for piece in rung.pieces.values()):
            return (
                "rungs have a low rank, in a basis that is another in each version: export a "
                "ladder by widths="
            )
        return ""

    def why_no_control(self, artifacts: int) -> str:
        """Devices can."""
        return ""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        """Begins with the full artifact's own parameters and buffers."""
        for each in artifacts:
            obstacle = personal_obstacle(self.settings.training, each.manifest)
            if obstacle:
                raise ValueError(obstacle)
        kept = self.settings.training.personal_names
        rungs = rungs_of(artifacts, kept, first=self.control)
        *_, full = artifacts
        parameters, buffers = trained_of(full)
        frozen = full.manifest.frozen_members
        return FedAvgMethod(parameters, buffers, self.settings, frozen, rungs)
