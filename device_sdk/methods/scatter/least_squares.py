"""The device's half of implicit least squares: its users' vectors in closed form, and two sums.

With V the items, L a user's and |I| all of them, a user's loss is

    sum over L of (1 - u.v)^2 + a0 sum over all items of (u.v)^2
        + lambda (|L| + a0 |I|) |u|^2

(Hu, Koren and Volinsky 2008, eq. 3; the frequency-scaled norm of Rendle et al. 2022, "Revisiting
the performance of iALS on item recommendation benchmarks", section 3.3). V comes as its singular
value decomposition has it, V = X S with V'V = |I| S^2 diagonal, the strongest columns first. So all
unseen items, none of which is drawn, are one number a column, and with
C = a0 |I| S^2 + lambda (|L| + a0 |I|), which is diagonal too, and B = V_L C^-1/2, the minimum is at
u = C^-1/2 y of the smallest

    |1 - B y|^2 + |y|^2.

A device of k columns solves any system of up to k equations, or of 64: of |L| equations where the
user has so few items, of K where k is that many. Else it solves for the k leading columns, as the
best approximation of that rank, and takes four steps of conjugate gradients over all K from there,
each of them eased by that solution (Takacs et al. 2011, "Applications of the conjugate gradient
method for implicit feedback collaborative filtering"): k^2 |L| + k^3, beside multiples of K |L|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError, lacks
from device_sdk.methods.scatter.contract import SOLVE, STRENGTHS
from device_sdk.methods.scatter.factor_step import is_finite
from device_sdk.wire.arrays.factored import MOST_USERS
from device_sdk.wire.arrays.tensors import singles
from device_sdk.wire.publish.report import Reason

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Likes:
    """What one user is trained on.

    ``rows``: int64 [n], distinct rows of the catalogue; ``weights``: float32 [n], 1 of a true one.
    """

    rows: Rows
    weights: Floats

    @classmethod
    def of(cls, rows: Rows, pseudo: Rows | None = None, pseudo_weight: float = 0.0) -> Self:
        """A user's own items and, as weak likes, its pseudo-items."""
        if pseudo is None or not len(pseudo):
            return cls(rows, np.ones(len(rows), dtype=np.float32))
        weights = np.ones(len(rows) + len(pseudo), dtype=np.float32)
        weights[len(rows) :] = pseudo_weight
        return cls(np.concatenate([rows, pseudo]), weights)


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """The problem that a model poses: of V = X S ``items``, X, float16 or float32 [items, K], and
    ``strengths``, S, [K]; a0, what an unseen item weighs; and lambda."""

    items: NDArray[Any]
    strengths: Floats
    unseen_weight: float
    l2: float

    @classmethod
    def of(cls, model: Mapping[str, NDArray[Any]]) -> Self:
        """From a broadcast's tensors. Raises LearnerError where one is missing or senseless."""
        items = items_of(model)
        strengths, solve = model.get(STRENGTHS), model.get(SOLVE)
        sound = strengths is not None and strengths.dtype.kind == "f"
        if strengths is None or not sound or strengths.shape != items.shape[1:]:
            raise lacks("the broadcast", f"{STRENGTHS!r}, floats of [{items.shape[1]}]")
        if not (np.isfinite(strengths) & (strengths >= 0)).all():
            raise LearnerError(
                f"the broadcast's {STRENGTHS!r} are no lengths: negative, or no number"
            )
        sound = solve is not None and solve.dtype.kind == "f" and solve.shape == (2,)
        if solve is None or not sound or not (np.isfinite(solve) & (solve > 0)).all():
            raise lacks("the broadcast", f"{SOLVE!r}, two numbers above 0")
        unseen_weight, l2 = solve.tolist()
        return cls(items, strengths.astype(np.float32), unseen_weight, l2)

    def vectors(self, users: Sequence[Likes]) -> Floats:
        """The users' best vectors, float32 [users, K], whose products with ``items`` are scores;
        zeros for one without items. Raises LearnerError where an item is not finite."""
        width = self.items.shape[1]
        found = np.zeros((len(users), width), dtype=np.float32)
        for place, likes in enumerate(users):
            if len(likes.rows):
                found[place] = self._solved(likes, width)[0]
        return found * self.strengths

    def trained(self, users: Sequence[Likes], k: int) -> dict[str, NDArray[Any]]:
        """What a device of k columns hands in of a round: the tensors of an update; see
        ``contract.py``. Raises LearnerError."""
        if len(users) > MOST_USERS:
            raise LearnerError(f"{len(users)} users on one device; {MOST_USERS} fit")
        some = [likes for likes in users if len(likes.rows)]
        solved = [self._solved(likes, k) for likes in some]
        vectors = np.array([vector for vector, _ in solved], dtype=np.float32)
        rows, pulls, counts, factor = _summed(
            [likes.rows for likes in some],
            [residual for _, residual in solved],
            vectors.reshape(-1, self.items.shape[1]),
        )
        return {
            "rows": rows,
            "pulls": pulls,
            "factor": factor,
            "counts": counts,
            "users": np.asarray(len(some), dtype=np.int64),
            "k": np.asarray(k, dtype=np.int64),
        }

    def _solved(self, likes: Likes, k: int) -> tuple[Floats, Floats]:
        """A user's u of V [K], and its errors on its items, times their weights, [n]."""
        unseen = self.unseen_weight * len(self.items)
        norm = self.l2 * (float(likes.weights.sum()) + unseen)
        scale = 1 / np.sqrt(np.float32(unseen) * self.strengths**2 + np.float32(norm))
        own, roots = self._own(likes.rows), np.sqrt(likes.weights)
        own *= self.strengths * scale
        if not (roots == 1).all():
            own *= roots[:, None]
        try:
            found, missing = _ridge(own, roots, k)
        except np.linalg.LinAlgError:
            raise LearnerError(_UNSOLVED, Reason.NOT_FINITE) from None
        vector = scale * found
        if not is_finite(vector):
            raise LearnerError(_UNSOLVED, Reason.NOT_FINITE)
        return vector, -roots * missing

    def _own(self, rows: Rows) -> Floats:
        own = singles(self.items.take(rows, axis=0))
        if not is_finite(own):
            raise LearnerError("the broadcast's 'items' hold values that are not finite")
        return own


_STEPS = 4
_FEW = 64
"""Equations that are solved in the time of the steps."""
_SETTLED = 1e-12
"""Of the loss at zero: what a step gains less of is not worth it, and may have no direction."""


def _ridge(own: Floats, target: Floats, k: int) -> tuple[Floats, Floats]:
    """The smallest |target - own y|^2 + |y|^2 by a device of k columns: y [K], and target - own y.

    ``own``: [n, K].
    """
    count, width = own.shape
    if count <= max(k, _FEW):
        missing = _one_more(own @ own.T, target)
        return missing @ own, missing
    part = own[:, :k]
    slope = target @ own
    if k == width:
        found = _one_more(part.T @ part, slope)
        return found, target - own @ found

    def eased(slope: Floats) -> Floats:
        found = slope.copy()
        found[:k] = inverse @ slope[:k]
        return found

    # What eases need not be exact.
    inverse = np.linalg.inv(part.T @ part + np.eye(k, dtype=np.float32))
    found, missing = np.zeros(width, dtype=np.float32), target
    along = eased(slope)
    gain, settled = slope @ along, _SETTLED * (target @ target)
    for _ in range(_STEPS):
        if not gain > settled:
            break  # it is the minimum, and what is left is float32's rounding
        moved = own @ along
        length = gain / (moved @ moved + along @ along)
        found = found + length * along
        missing = missing - length * moved
        slope = missing @ own - found
        ahead = eased(slope)
        gain, before = slope @ ahead, gain
        along = ahead + (gain / before) * along
    return found, missing


def _one_more(squares: Floats, target: Floats) -> Floats:
    """The solution of (squares + 1) x = target."""
    system = squares.astype(np.float64)
    system[np.diag_indices(len(system))] += 1
    return np.linalg.solve(system, target).astype(np.float32)


def _summed(
    rows: Sequence[Rows], residuals: Sequence[Floats], vectors: Floats
) -> tuple[Rows, Floats, Rows, Floats]:
    """Users' gradients and outer products, summed: ``rows`` of all, ``pulls``, ``counts``,
    ``factor``."""
    named = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    every, counts = np.unique(named, return_counts=True)
    turned, factor = np.ones((1, 1), dtype=np.float32), vectors
    if len(rows) > 1:
        turned, factor = _turned(vectors)
    pulls = np.zeros((len(every), len(factor)), dtype=np.float32)
    for own, residual, turn in zip(rows, residuals, turned, strict=False):
        pulls[every.searchsorted(own)] += residual[:, None] * turn
    return every, pulls, counts.astype(np.int64, copy=False), factor


_LITTLE = 1e-10
"""Of the largest eigenvalue: a smaller one is of no direction that the users have."""


def _turned(vectors: Floats) -> tuple[Floats, Floats]:
    """Q [users, f] and F [f, k] of U = Q F, with rows of F that are orthogonal.

    Of the outer products' sum alone: the eigenvectors of U'U, each as long as it is in it. A
    triangular F of any other QR is that of some users' order where U has dependent columns, or
    such as nobody trained: its first row would be the first user's vector.
    """
    wide = vectors.astype(np.float64)
    values, turn = np.linalg.eigh(wide.T @ wide)
    has = values > _LITTLE * values[-1]
    lengths, turn = np.sqrt(values[has]), turn[:, has]
    return (wide @ (turn / lengths)).astype(np.float32), (turn * lengths).T.astype(np.float32)


_UNSOLVED = (
    "a user's vector has no finite solution: the broadcast's items or their strengths are no "
    "model's"
)


def items_of(model: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """V, [items, K], of a broadcast's tensors. Raises LearnerError where it is not there, or of no
    width."""
    items = model.get("items")
    if items is None or items.ndim != 2 or items.dtype not in (np.float32, np.float16):
        raise lacks("the broadcast", "'items', float32 or float16 of [items, K]")
    if items.shape[1] == 0:
        raise LearnerError("the broadcast's 'items' have no columns")
    return items
