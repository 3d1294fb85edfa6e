"""One gradient of the BPR loss over devices' triples: by the exported graph, or by NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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


class Blocks:
    """Devices that lie one behind the other in the two factor matrices of a step.

    A device's users score its own rows only. The scores are a *table* [users, rows] a device, and
    the tables lie in one flat array of *cells*.

    Args:
        users, rows: of each device, how many; at least one user, and one row.
    """

    def __init__(self, users: Sequence[int], rows: Sequence[int]) -> None:
        self._slices: list[tuple[slice, slice, slice]] = []
        self._one_each = max(users) == 1
        lines = []
        user = row = cell = 0
        for mine, length in zip(users, rows, strict=True):
            ends = user + mine, row + length, cell + mine * length
            self._slices.append((slice(user, ends[0]), slice(row, ends[1]), slice(cell, ends[2])))
            if not self._one_each:
                lines.append(cell - row + length * np.arange(mine))
            user, row, cell = ends
        # Where a user's line of the table would begin if it began with the matrix's first row.
        self._lines = np.concatenate(lines) if lines else np.zeros(user, dtype=np.int64)
        self.cells = cell
        """Of all tables."""

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Of each device the users, the rows, and the cells of its table."""
        return iter(self._slices)

    def cells_of(self, user: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cells of users and rows, which are counted through all devices."""
        # Where each device has one user, there are as many cells as rows.
        return row if self._one_each else self._lines.take(user) + row

    def margins(
        self,
        users: Floats,
        items: Floats,
        user: NDArray[np.int64],
        positive: NDArray[np.int64],
        negative: NDArray[np.int64],
    ) -> Floats:
        """By how much triples' liked items score above the others at ``users`` [users, k] and
        ``items`` [rows, k], float32 [triples]."""
        scores = np.empty(self.cells, dtype=np.float32)
        for mine, rows, cells in self:
            table = scores[cells].reshape(mine.stop - mine.start, -1)
            np.dot(users[mine], items[rows].T, out=table)
        liked, other = self.cells_of(user, positive), self.cells_of(user, negative)
        return scores.take(liked) - scores.take(other)


@dataclass(frozen=True, slots=True, eq=False)
class FactorBatch:
    """Triples as row indices into the two factor matrices of a step.

    ``user``, ``positive``, ``negative``: int64 [triples]; ``weight``, ``offset``: float32
    [triples], the latter a constant that is added to each triple's score difference. ``blocks``:
    the devices whose triples these are; None stands for one.
    """

    user: NDArray[np.int64]
    positive: NDArray[np.int64]
    negative: NDArray[np.int64]
    weight: Floats
    offset: Floats
    user_l2: float
    item_l2: float
    blocks: Blocks | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FactorGradients:
    """The loss's gradients: ``users`` float32 [users, k], ``items`` float32 [rows, k]."""

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
            self._trainer.step(entries)
        except DeviceError as error:
            raise LearnerError(f"the train step failed: {error}") from error
        after = self._trainer.parameters
        return FactorGradients(
            users=users - np.asarray(after["users.weight"], dtype=np.float32),
            items=items - np.asarray(after["items.weight"], dtype=np.float32),
        )


def is_finite(values: Floats) -> bool:
    """Whether all are. A sum of squares, a fraction of the cost, settles the common case."""
    flat = values.reshape(-1)
    return math.isfinite(flat @ flat) or bool(np.isfinite(values).all())


class NumpyStep:
    """A :class:`FactorStep` without onnxruntime, for the formula above.

    A device's users' scores of all its rows are one matrix product, and so are both gradients: the
    triples only say which cells of the table [users, rows] are read, and what is added to them. It
    takes 16 bytes a cell, and its time grows with the tables, not with the triples.

    What it computes for a device is the same, bit for bit, whichever devices are with it.
    """

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        blocks = batch.blocks or Blocks([len(users)], [len(items)])
        found = FactorGradients(np.empty_like(users), np.empty_like(items))
        liked = blocks.cells_of(batch.user, batch.positive)
        other = blocks.cells_of(batch.user, batch.negative)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
            margin = blocks.margins(users, items, batch.user, batch.positive, batch.negative)
            margin += batch.offset
            # -weight * sigmoid(-margin), without overflow on either side.
            pull = batch.weight * np.expm1(-np.logaddexp(np.float32(0.0), -margin))
            pulls = np.bincount(liked, pull, blocks.cells)
            pulls -= np.bincount(other, pull, blocks.cells)
            table = pulls.astype(np.float32)
            by_user = np.bincount(batch.user, batch.weight, len(users))
            by_item = np.bincount(batch.positive, batch.weight, len(items))
            by_item += np.bincount(batch.negative, batch.weight, len(items))
            user_l2 = (batch.user_l2 * by_user).astype(np.float32)[:, None]
            item_l2 = (batch.item_l2 * by_item).astype(np.float32)[:, None]
            for mine, rows, cells in blocks:
                pulled = table[cells].reshape(mine.stop - mine.start, -1)
                own, gradients = items[rows], found.items[rows]
                np.dot(pulled, own, out=found.users[mine])
                np.dot(pulled.T, users[mine], out=gradients)
                gradients += item_l2[rows] * own
            np.add(found.users, user_l2 * users, out=found.users)
            finite = is_finite(margin) and is_finite(found.users) and is_finite(found.items)
        if not finite:
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
        if len(users) == (1 if batch.blocks is None else len(batch.blocks)):
            return self._numpy.gradients(users, items, batch)
        if self._graph is None:
            try:
                self._graph = self._open_graph()
            except RuntimeMissing:
                self._graph = self._numpy
        return self._graph.gradients(users, items, batch)
