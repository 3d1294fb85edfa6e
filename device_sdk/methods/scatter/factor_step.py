"""One gradient of the BPR loss over a device's triples: by the exported graph, or by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device_sdk.errors import DeviceError, RuntimeMissing
from device_sdk.methods.learner import LearnerError
from device_sdk.wire.publish.report import Reason

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


class NumpyStep:
    """A :class:`FactorStep` without onnxruntime, for the formula above.

    All users' scores of all rows are one matrix product, and so are both gradients: the triples
    only say which cells of the table [users, rows] are read, and what is added to them. It takes
    16 bytes a cell, and its time grows with the table, not with the triples.
    """

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        rows = len(items)
        liked = batch.user * rows + batch.positive
        other = liked - batch.positive + batch.negative
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
            scores = (users @ items.T).reshape(-1)
            margin = scores.take(liked) - scores.take(other) + batch.offset
            loss = np.logaddexp(np.float32(0.0), -margin)
            # -weight * sigmoid(-margin), without overflow on either side.
            pull = batch.weight * np.expm1(-loss)
            cells = np.concatenate([liked, other])
            pulls = np.bincount(cells, np.concatenate([pull, -pull]), len(scores))
            table = pulls.astype(np.float32).reshape(len(users), rows)
            by_user = np.bincount(batch.user, batch.weight, len(users))
            by_item = np.bincount(batch.positive, batch.weight, rows)
            by_item += np.bincount(batch.negative, batch.weight, rows)
            shrunk_users = (batch.user_l2 * by_user).astype(np.float32)[:, None] * users
            shrunk_items = (batch.item_l2 * by_item).astype(np.float32)[:, None] * items
            found = FactorGradients(
                loss=float(batch.weight @ loss)
                + 0.5 * float(np.vdot(shrunk_users, users) + np.vdot(shrunk_items, items)),
                users=table @ items + shrunk_users,
                # One user's is an outer product, which BLAS is slow at.
                items=(table.T * users if len(users) == 1 else table.T @ users) + shrunk_items,
            )
        if not (
            np.isfinite(found.loss)
            and np.isfinite(found.users).all()
            and np.isfinite(found.items).all()
        ):
            raise LearnerError(
                "the train step failed: its loss or a gradient is not finite; lower the rates",
                Reason.NOT_FINITE,
            )
        return found


class StepByUsers:
    """A :class:`FactorStep`: NumPy's for one user, the graph's for more where it can be had.

    For one user NumPy takes half the graph's time, and onnxruntime is not even loaded. For more it
    may be faster or much slower, with the sizes and with the threads of NumPy's BLAS. The number of
    users alone decides, so that the same step gives the same answer each time; the two differ by
    float32 rounding, as two processors do.

    ``open_graph`` gives the graph's step, once; it may raise :class:`RuntimeMissing`.
    """

    def __init__(self, open_graph: Callable[[], FactorStep]) -> None:
        self._open_graph = open_graph
        self._numpy = NumpyStep()
        self._graph: FactorStep | None = None

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        if len(users) == 1:
            return self._numpy.gradients(users, items, batch)
        if self._graph is None:
            try:
                self._graph = self._open_graph()
            except RuntimeMissing:
                self._graph = self._numpy
        return self._graph.gradients(users, items, batch)
