"""One gradient of the BPR loss over a device's triples, computed by the exported graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device_sdk.errors import DeviceError
from device_sdk.methods.learner import LearnerError

if TYPE_CHECKING:
    from device_sdk.trainer import Trainer


Floats = NDArray[np.float32]

# Plain SGD at rate 1 moves each parameter by its gradient, which is then the difference.
_ONE = np.asarray(1.0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class FactorBatch:
    """Triples as row indices into the two factor matrices of a step.

    ``user``, ``positive``, ``negative``: int64 [triples]; ``weight``, ``offset``: float32
    [triples], the latter a constant that is added to each triple's score difference.
    """

    user: NDArray[np.int64]
    positive: NDArray[np.int64]
    negative: NDArray[np.int64]
    weight: Floats
    offset: Floats
    user_l2: float
    item_l2: float


@dataclass(frozen=True, slots=True, eq=False)
class FactorGradients:
    """``loss`` and its gradients: ``users`` float32 [users, k], ``items`` float32 [rows, k]."""

    loss: float
    users: Floats
    items: Floats


class FactorStep(Protocol):
    """Computes, for users u, liked items p and others n, the gradients of the summed loss

    sum over triples of weight * (softplus(-(u.(p - n) + offset))
                                  + user_l2 / 2 |u|^2 + item_l2 / 2 (|p|^2 + |n|^2)).
    """

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        """Gradients at ``users`` float32 [users, k] and ``items`` float32 [rows, k].

        Raises LearnerError when they cannot be computed, or are not finite.
        """


class TrainerStep:
    """A :class:`FactorStep` on the matrix factorisation artifact's train graph.

    One trainer may serve any number of learners in turn: each step sets all of its state.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        """See :class:`FactorStep`."""
        values = {"users.weight": users, "items.weight": items}
        entries: dict[str, NDArray[Any]] = {
            "user": batch.user,
            "positive": batch.positive,
            "negative": batch.negative,
            "weight": batch.weight,
            "offset": batch.offset,
            "rate_users": _ONE,
            "rate_items": _ONE,
            "l2_users": np.asarray(batch.user_l2, dtype=np.float32),
            "l2_items": np.asarray(batch.item_l2, dtype=np.float32),
        }
        try:
            self._trainer.set_parameters(values)
            loss = self._trainer.step(entries)
        except DeviceError as error:
            raise LearnerError(f"the train step failed: {error}") from error
        after = self._trainer.parameters
        return FactorGradients(
            loss=float(loss),
            users=users - np.asarray(after["users.weight"], dtype=np.float32),
            items=items - np.asarray(after["items.weight"], dtype=np.float32),
        )
