"""Prototypes that the server learns from those of the devices, so that classes stay apart.

Source: Zhang et al. 2024, "FedTGP: Trainable global prototypes with adaptive-margin-enhanced
contrastive learning for data and model heterogeneity in federated learning" (AAAI): trainable
prototypes, and contrastive learning with an adaptive margin. Network, margin and defaults are those
of the authors' code (TsingZ0/HtFLlib, servertgp.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.methods.state import Entry, Schema, Stateful

Floats = NDArray[np.float64]
_LEAST_DISTANCE = 1e-12


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
