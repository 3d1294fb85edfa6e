"""The aggregator's half of federated prototypes: one vector for each class, out of the devices'.

Methods: FedProto (Tan et al. 2022, "FedProto: Federated prototype learning across heterogeneous
clients", AAAI), whose global prototypes are means over the devices that have the class (equation
6), and FedTGP (Zhang et al. 2024), whose server trains them (:class:`TrainablePrototypes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import UpdateBounds
from aggregator.methods.fleet import bounded_rows
from aggregator.methods.method import Binding, Method, RateDecay, Refused, rate_at
from aggregator.methods.robust import Robust, RobustRule, TrimShare
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import Stage
from device_sdk.fields import Declared, Within
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.prototypes.contract import PrototypesTraining, decode_prototypes
from device_sdk.methods.state import Entry, Schema, Stateful
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.arrays.tensors import LARGEST_TO_HAND_ON

Floats = NDArray[np.float64]
_LEAST_DISTANCE = 1e-12


# Prototypes that the server learns from those of the devices, so that classes stay apart.
#
# Source: Zhang et al. 2024, "FedTGP: Trainable global prototypes with adaptive-margin-enhanced
# contrastive learning for data and model heterogeneity in federated learning" (AAAI): trainable
# prototypes, and contrastive learning with an adaptive margin. Network, margin and defaults are
# those of the authors' code (TsingZ0/HtFLlib, servertgp.py).


@dataclass(frozen=True, slots=True)
class PrototypeServerSettings(Declared):
    """How the server trains the prototypes when a round closes.

    Attributes:
        epochs, batch_size, learning_rate: passes over the devices' prototypes, prototypes a step,
            and the rate of plain gradient descent.
        most_margin: tau, the largest margin.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    epochs: Annotated[int, Within(1, 100_000)] = 100
    batch_size: Annotated[int, Within(1, 1_000_000)] = 10
    learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.01
    most_margin: Annotated[float, Within(0, 1e6)] = 100.0


class TrainablePrototypes(Stateful):
    """A vector for each class, through a small network that all classes share.

    ``prototype of c = W2 relu(W1 v_c + b1) + b2``, all of ``width`` numbers. The network is kept
    from round to round. Pure arithmetic in float64: the same calls give the same bits on the same
    machine.

    Args:
        rng: draws the first weights, from torch's default distributions.
    """

    FRESH = True

    def __init__(
        self,
        classes: int,
        width: int,
        settings: PrototypeServerSettings,
        rng: np.random.Generator,
    ) -> None:
        self._settings = settings
        bound = 1 / math.sqrt(width)
        self._vectors = rng.standard_normal((classes, width))
        self._weight1 = rng.uniform(-bound, bound, (width, width))
        self._bias1 = rng.uniform(-bound, bound, width)
        self._weight2 = rng.uniform(-bound, bound, (width, width))
        self._bias2 = rng.uniform(-bound, bound, width)

    @property
    def prototypes(self) -> Floats:
        """[classes, width]."""
        return np.maximum(self._inner(), 0) @ self._weight2 + self._bias2

    def fit(self, sent: Floats, labels: NDArray[np.int64], rng: np.random.Generator) -> float:
        """Train on the devices' prototypes ``sent`` [n, width] of ``labels`` [n]; the mean loss of
        the last pass.

        Each attracts the prototype of its class and repels all others, until its own is nearer than
        they are by the margin: cross-entropy of minus the Euclidean distances, of which the one to
        its own class is larger by :func:`margin_of`. Where training ends in numbers that are not
        finite the network stays as it was, and the loss is infinite.
        """
        told = self._settings
        margin = margin_of(sent, labels, told.most_margin)
        before = self.state()
        losses: list[float] = []
        for _ in range(told.epochs):
            order = rng.permutation(len(sent))
            batches = np.array_split(order, range(told.batch_size, len(order), told.batch_size))
            losses = [self._step(sent[rows], labels[rows], margin) for rows in batches]
        loss = float(np.mean(losses))
        if not (math.isfinite(loss) and np.isfinite(self.prototypes).all()):
            self.restore(before)
            return math.inf
        return loss

    def gradient(
        self, sent: Floats, labels: NDArray[np.int64], margin: float
    ) -> tuple[float, tuple[Floats, ...]]:
        """The mean loss of a batch, and its gradient by vectors, weight1, bias1, weight2, bias2."""
        inner = self._inner()
        hidden = np.maximum(inner, 0)
        made = hidden @ self._weight2 + self._bias2
        squares = (sent * sent).sum(1)[:, None] - 2 * (sent @ made.T) + (made * made).sum(1)
        distances = np.sqrt(np.maximum(squares, _LEAST_DISTANCE**2))
        rows = np.arange(len(sent))
        scores = -distances
        scores[rows, labels] -= margin
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        # By a distance: what its class should have of the probability, less what it has.
        pulls = -np.exp(logs)
        pulls[rows, labels] += 1
        pulls /= distances * len(sent)
        by_made = pulls.sum(axis=0)[:, None] * made - pulls.T @ sent
        by_inner = (by_made @ self._weight2.T) * (inner > 0)
        gradients = (
            by_inner @ self._weight1.T,
            self._vectors.T @ by_inner,
            by_inner.sum(axis=0),
            hidden.T @ by_made,
            by_made.sum(axis=0),
        )
        return -float(logs[rows, labels].mean()), gradients

    def _inner(self) -> Floats:
        return self._vectors @ self._weight1 + self._bias1

    def _step(self, sent: Floats, labels: NDArray[np.int64], margin: float) -> float:
        # A rate too high ends in infinities, which fit looks for.
        with np.errstate(all="ignore"):
            loss, gradients = self.gradient(sent, labels, margin)
            for array, gradient in zip(self._arrays(), gradients, strict=True):
                array -= self._settings.learning_rate * gradient
        return loss

    def _arrays(self) -> tuple[Floats, ...]:
        return (self._vectors, self._weight1, self._bias1, self._weight2, self._bias2)

    def _schema(self) -> Schema:
        names = ("vectors", "weight1", "bias1", "weight2", "bias2")
        return {
            name: Entry(np.float64, array.shape)
            for name, array in zip(names, self._arrays(), strict=True)
        }


def margin_of(sent: Floats, labels: NDArray[np.int64], most: float) -> float:
    """delta: of the classes' means over the devices, the largest distance to the nearest other one,
    and at most ``most``, which it is where there is one class alone."""
    present = np.unique(labels)
    if len(present) < 2:
        return most
    means = np.stack([sent[labels == label].mean(axis=0) for label in present])
    nearest = [
        np.delete(np.linalg.norm(means - mean, axis=1), place).min()
        for place, mean in enumerate(means)
    ]
    return min(float(max(nearest)), most)


@dataclass(frozen=True, slots=True)
class PrototypesSettings(Declared):
    """Settings of a task of federated prototypes.

    Attributes:
        training: what the broadcast tells the devices.
        rate_decay: ``learning_rate`` falls by this factor a round.
        weights: whether a mean is over the devices that have the class, or over their samples.
        most_samples: a device's claim of samples of one class counts up to this many.
        most_length: a device's prototype that is longer is scaled down to it; 0 for no limit.
        robust, trim_share: how the mean is taken, see
            :class:`~aggregator.methods.robust.RobustRule`; devices then count alike.
        trained: the server trains the prototypes (FedTGP) in place of taking means.
        server: how it does.

    Raises ValueError, naming the setting, for a value outside its range, or where two do not go
    together.
    """

    training: PrototypesTraining
    rate_decay: RateDecay = 1.0
    weights: Literal["devices", "samples"] = "devices"
    most_samples: Annotated[int, Within(1, 2**31 - 1)] = 10_000
    most_length: Annotated[float, Within(0)] = 0.0
    robust: Robust = "none"
    trim_share: TrimShare = 0.1
    trained: bool = False
    server: PrototypeServerSettings = field(default_factory=PrototypeServerSettings)

    def check(self) -> None:
        if self.rate_decay < 1 and self.training.learning_rate == 0:
            raise ValueError("rate_decay needs a learning_rate: the artifact's own cannot fall")
        if self.trained and self.robust != "none":
            raise ValueError(
                f"robust is {self.robust!r}: it is a way to take means, which trained prototypes "
                "are not; set one of the two"
            )
        if self.weights == "samples" and (self.trained or self.robust != "none"):
            raise ValueError(
                "weights is 'samples': trained prototypes and robust means count devices alike"
            )


class PrototypesMethod(Method):
    """Makes global prototypes; see :class:`~aggregator.methods.method.Method` for the calls.

    Args:
        settings: of the task.
        rng: draws the first weights of the network that trains prototypes; not used otherwise.

    Memory is that of two [classes, width] tables, however many updates are absorbed. With
    ``trained`` or a ``robust`` rule the devices' own prototypes are held until the round closes,
    and stored with each checkpoint within it: up to
    :data:`~aggregator.methods.robust.MOST_HELD_BYTES`, after which the round is full.
    """

    PARTS = ("server",)
    ADDED = ("sums", "weights", "devices", "bounded")
    _sums: NDArray[np.float64]
    _weights: NDArray[np.int64]
    _devices: NDArray[np.int64]
    _bounded: int
    bounds = UpdateBounds(rows=("prototypes",), counts=("counts",))

    def __init__(self, settings: PrototypesSettings, rng: np.random.Generator) -> None:
        self._settings = settings
        classes, width = settings.training.classes, settings.training.width
        self._rule = RobustRule(settings.robust, settings.trim_share)
        self._server = (
            TrainablePrototypes(classes, width, settings.server, rng) if settings.trained else None
        )
        self._known = np.zeros((classes, width), dtype=np.float32)
        self._known_devices = np.zeros(classes, dtype=np.int64)
        self._sent: list[LabelKnowledge] = []
        self.begin(0)

    @property
    def prototypes(self) -> NDArray[np.float32]:
        """Of the last version, [classes, width]; zero where no device had the class yet."""
        return self._known.copy()

    def tell(self) -> Broadcast:
        """The broadcast holds ``prototypes`` float32 [classes, width], and ``devices`` int64
        [classes]: how many devices a class's prototype is of, 0 where there is none. A class that
        no device of a round had keeps its prototype."""
        told = self._settings.training
        if self._settings.rate_decay < 1:
            rate = rate_at(told.learning_rate, self._settings.rate_decay, self._round_id)
            told = replace(told, learning_rate=rate)
        return Broadcast(
            round_id=self._round_id,
            version=self._version,
            tensors={"prototypes": self._known.copy(), "devices": self._known_devices.copy()},
            settings=told.as_scalars(),
        )

    def require(self, update: Update) -> None:
        """Refuses with reason ``bad-tensors`` or ``bad-metadata``."""
        if update.metadata:
            raise Refused("bad-metadata", "expected no metadata")
        try:
            decode_prototypes(update.tensors, self._settings.training)
        except ValueError as error:
            raise Refused("bad-tensors", str(error)) from error

    @property
    def keeps(self) -> bool:
        return self._settings.trained or self._rule.holds

    def expected(self, update: Update) -> dict[str, NDArray[np.float32]]:
        """The last version's prototypes of the device's labels; nothing of those without one."""
        labels = update.tensors["labels"].astype(np.int64)
        known = self._known[labels]
        known[self._known_devices[labels] == 0] = np.nan
        return {"prototypes": known}

    def add(self, update: Update) -> None:
        found = self._bounded_knowledge(update)
        if self.keeps:
            self._sent.append(found)
            return
        weight = np.ones_like(found.counts)
        if self._settings.weights == "samples":
            weight = np.minimum(found.counts, self._settings.most_samples)
        self._sums[found.labels] += found.means.astype(np.float64) * weight[:, None]
        self._weights[found.labels] += weight
        self._devices[found.labels] += 1

    def step(self) -> Mapping[str, float]:
        """Figures: ``labels`` known, ``bounded`` prototypes that were longer than the task's limit,
        and of trained prototypes ``server_loss`` (-1 where the training failed, and prototypes
        stay)."""
        figures: dict[str, float] = {}
        if self.keeps:
            figures = self._of_all()
        else:
            here = self._devices > 0
            self._take(here, self._sums[here] / self._weights[here, None])
        figures["bounded"] = float(self._bounded)
        figures["labels"] = float((self._known_devices > 0).sum())
        return figures

    def _of_all(self) -> dict[str, float]:
        """Of what was held, by the robust rule or by training."""
        each, self._sent = self._sent, []
        labels = np.concatenate([one.labels for one in each])
        sent = np.concatenate([one.means for one in each])
        self._devices = np.bincount(labels, minlength=self._settings.training.classes)
        here = self._devices > 0
        if not here.any():
            return {}
        if self._server is None:
            means = [self._rule.mean(sent[labels == label]) for label in np.flatnonzero(here)]
            self._take(here, np.stack(means))
            return {}
        rng = np.random.default_rng(self._round_id)
        loss = self._server.fit(sent.astype(np.float64), labels, rng)
        if not np.isfinite(loss):
            return {"server_loss": -1.0}
        # A step moves all classes, for they share the network.
        known = here | (self._known_devices > 0)
        self._take(known, self._server.prototypes[known])
        return {"server_loss": loss}

    def _take(self, here: NDArray[np.bool_], prototypes: NDArray[np.floating]) -> None:
        most = LARGEST_TO_HAND_ON
        self._known[here] = np.clip(prototypes, -most, most)
        self._known_devices = np.where(self._devices > 0, self._devices, self._known_devices)

    def _bounded_knowledge(self, update: Update) -> LabelKnowledge:
        found = decode_prototypes(update.tensors, self._settings.training)
        if not self._settings.most_length:
            return found
        lengths = np.sqrt(np.einsum("ij,ij->i", found.means, found.means, dtype=np.float64))
        means, count = bounded_rows(found.means, lengths, self._settings.most_length)
        self._bounded += count
        return replace(found, means=means)

    def schema(self) -> Schema:
        classes, width = self._settings.training.classes, self._settings.training.width
        return {
            "known": Entry(np.float32, (classes, width)),
            "known_devices": Entry(np.int64, (classes,), least=0),
            "sums": Entry(np.float64, (classes, width)),
            "weights": Entry(np.int64, (classes,), least=0),
            "devices": Entry(np.int64, (classes,), least=0),
        }


class PrototypesBinding(Binding[PrototypesSettings]):
    """Models of any kind; but all must know the same classes, and embed in the same width."""

    __slots__ = ()
    settings_class = PrototypesSettings

    @property
    def stages(self) -> tuple[Stage, ...]:
        """No model is sent to anybody: each device has its own."""
        return ("personal",)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> PrototypesMethod:
        """Nothing of the artifacts but which classes they know, and how they embed."""
        training = self.settings.training
        wanted = (training.classes, training.width)
        for artifact in artifacts:
            name, graphs = artifact.manifest.name, artifact.manifest.graphs
            taken = [p.shape for p in graphs["train"].select("batch") if p.of == "prototype"]
            if not taken:
                raise ValueError(
                    f"artifact {name!r} takes no prototype: export it with "
                    "export.losses.prototype_alignment's loss"
                )
            if taken[0] != wanted:
                raise ValueError(
                    f"artifact {name!r} takes prototypes {taken[0]}; the task's classes and width "
                    f"are {wanted}"
                )
            if not any(p.of == "embedding" for p in graphs["infer"].select("output")):
                raise ValueError(
                    f"artifact {name!r} predicts no embedding: export it with a predict= that "
                    "returns it"
                )
        return PrototypesMethod(self.settings, rng)
