"""What a scatter task minimises, the aggregator's half: how a round's sums become a step.

A loss reads its updates, adds up what it needs beside the sum of gradients, and moves the items.
Bounds, robust means, columns, restarts and shards are the method's, and alike for every loss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.limits import UpdateLimits
from aggregator.methods.method import Arrays, Refused
from aggregator.methods.robust import RobustRule
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from aggregator.methods.summing import Judged
from aggregator.methods.sums import Additive
from device_sdk.methods.scatter.contract import BPR_TENSORS, BprTraining
from device_sdk.wire.arrays.exchange import Scalar, Update

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]
# A dtype compares with another at once, with a scalar type only after making one of it.
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RoundSum:
    """What a round's accepted updates add up to.

    ``gradient``: float64 [items, K]; ``drawn``: int64 [K], updates by column; ``updates``: how
    many.
    """

    gradient: Doubles
    drawn: Counts
    updates: int


Measures = tuple[float, ...]


class ScatterLoss(Additive):
    """One loss. ``TENSORS`` are its updates', ``MEASURES`` what limits have to know of an update
    beside its norm, lengths first."""

    shape: tuple[int, int]
    """Of V, [items, K]."""
    TENSORS: ClassVar[frozenset[str]]
    MEASURES: ClassVar[int] = 0
    FRESH = True

    @abstractmethod
    def told(self, items: Floats) -> tuple[Arrays, Mapping[str, Scalar]]:
        """A broadcast's tensors and settings."""

    def model(self) -> Arrays:
        """What a version's model holds beside ``items``. Here: nothing."""
        return {}

    def bound_by(self, limits: UpdateLimits) -> None:
        """Bounds follow from what is known of the fleet, after a restart within a round too. Here:
        there are none."""

    def go_on_from(self, before: ScatterLoss) -> None:
        """Take over what the loss of another model of this task knows of the data. Here: nothing
        is known."""

    def begin_sums(self) -> None:
        """The round's updates are added as they come: make what they are added to. Here: no
        matter."""

    @abstractmethod
    def columns(self, update: Update) -> Counts:
        """The columns that an update's gradient is of, int64, rising; unchecked."""

    def trained(self, update: Update) -> int:
        """How many columns the device of a checked update trained, its k."""
        return len(self.columns(update))

    @abstractmethod
    def squares(self, update: Update) -> float:
        """At least the sum of the gradient's squares. Raises :class:`Refused` for tensors whose
        dtypes or shapes do not fit the update's rows and columns, or each other, and for what is
        too large beside the gradient."""

    @abstractmethod
    def values(self, update: Update) -> Floats:
        """The gradient that a checked update holds, [rows, columns]."""

    @staticmethod
    def unfolded(update: Update) -> int:
        """The bytes of what a robust rule has to have of an update beside its tensors, all of a
        round at once. Here: nothing."""
        return 0

    def measures(self, update: Update) -> Measures:
        """What limits take note of beside the norm. Here: nothing."""
        return ()

    def factor(self, measures: Measures) -> float:
        """What an update within the limits of its norm has to be multiplied by, at most 1."""
        return 1.0

    def absorb(self, one: Judged) -> None:
        """Add what is added beside the gradient, times its factor."""

    def absorb_held(self, judged: Sequence[Judged], rule: RobustRule) -> None:
        """Likewise of a round's held updates, all of them, by a robust rule where one holds."""
        for one in judged:
            self.absorb(one)

    @abstractmethod
    def step(self, items: Floats, found: RoundSum) -> tuple[Floats, dict[str, float]]:
        """The items, moved, and figures for people. Between rounds nothing else changes."""

    @abstractmethod
    def grow(self, items: int) -> None:
        """``items`` more rows, of which nothing is known."""

    def width(self) -> int:
        """How many columns the next version is to have, after a step. Here: as many as before."""
        return self.shape[1]

    def widen(self, columns: int) -> None:
        """``columns`` in all, those behind the present ones new."""
        raise NotImplementedError(f"{type(self).__name__} keeps its width")


class BprLoss(ScatterLoss):
    """Bayesian personalised ranking: a server's optimizer descends along the mean gradient.

    Args:
        shape: of V, [items, K].
        optimizer: of the server. Its decay holds for the users' rate too.
        training: what devices are told.
        by_column: divide each column by those who drew it; else by all (the patent's).
    """

    TENSORS = BPR_TENSORS
    PARTS = ("optimizer",)

    def __init__(
        self,
        shape: tuple[int, int],
        optimizer: OptimizerSettings,
        training: BprTraining,
        *,
        by_column: bool,
    ) -> None:
        self.shape, self._training, self._by_column = shape, training, by_column
        self._optimizer = ServerOptimizer(optimizer, shape)

    def told(self, items: Floats) -> tuple[Arrays, Mapping[str, Scalar]]:
        training = self._training
        rate = training.user_learning_rate * self._optimizer.factor
        return {"items": items}, replace(training, user_learning_rate=rate).as_scalars()

    def columns(self, update: Update) -> Counts:
        return update.tensors["columns"]

    def squares(self, update: Update) -> float:
        values = update.tensors["values"]
        shape = (len(update.tensors["rows"]), len(update.tensors["columns"]))
        require_floats("values", values, shape)
        flat = values.reshape(-1)
        return float(flat.dot(flat))

    def values(self, update: Update) -> Floats:
        return update.tensors["values"]

    def step(self, items: Floats, found: RoundSum) -> tuple[Floats, dict[str, float]]:
        divisor = np.maximum(found.drawn, 1) if self._by_column else found.updates
        gradient = (found.gradient / divisor).astype(np.float32)
        moved = self._optimizer.step(items, gradient)
        return moved, {"gradient_norm": float(np.linalg.norm(gradient))}

    def grow(self, items: int) -> None:
        self.shape = (self.shape[0] + items, self.shape[1])
        self._optimizer.grow(items)


def require_floats(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raises :class:`Refused` with reason ``bad-values``."""
    if values.dtype != FLOAT32 or values.shape != shape:
        raise Refused(
            "bad-values", f"{name} are {values.dtype} {values.shape}; expected float32 {shape}"
        )
