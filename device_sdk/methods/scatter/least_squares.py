"""The device's half of implicit least squares: its users' vectors in closed form, and two sums.

With V the items, L a user's and |I| all of them, a user's loss is

    sum over L of (1 - u.v)^2 + a0 sum over all items of (u.v)^2
        + lambda (|L| + a0 |I|) |u|^2

(Hu, Koren and Volinsky 2008, eq. 3; the frequency-scaled norm of Rendle et al. 2022, "Revisiting
the performance of iALS on item recommendation benchmarks", section 3.3). The Gram matrix V'V stands
for all unseen items, none of which is drawn. A device of k_i columns minimises over the k_i of u
that promise most, the others held as earlier rounds left them (subspace optimisation: Rendle et al.
2021, "iALS++"), and takes four steps of conjugate gradients over all K from there (Takacs et al.
2011, "Applications of the conjugate gradient method for implicit feedback collaborative
filtering"): k^2 |L| + k^3, beside multiples of K |L|. With all K columns the first is the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import GRAM, SOLVE
from device_sdk.methods.scatter.factor_step import is_finite
from device_sdk.wire.arrays.factored import MOST_USERS
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
    """The problem that a model poses: V float16 or float32 [items, K], its mean Gram matrix [K, K],
    a0 (what an unseen item weighs) and lambda."""

    items: NDArray[Any]
    gram: Floats
    unseen_weight: float
    l2: float

    @classmethod
    def of(cls, model: Mapping[str, NDArray[Any]]) -> Self:
        """From a broadcast's tensors. Raises LearnerError where one is missing or senseless."""
        items = items_of(model)
        width = items.shape[1]
        gram, solve = model.get(GRAM), model.get(SOLVE)
        if gram is None or gram.dtype.kind != "f" or gram.shape != (width, width):
            raise LearnerError(f"the broadcast lacks {GRAM!r}, floats of [{width}, {width}]")
        sound = solve is not None and solve.dtype.kind == "f" and solve.shape == (2,)
        if solve is None or not sound or not (np.isfinite(solve) & (solve > 0)).all():
            raise LearnerError(f"the broadcast lacks {SOLVE!r}, two numbers above 0")
        unseen_weight, l2 = solve.tolist()
        return cls(items, _sound_gram(gram.astype(np.float64)), unseen_weight, l2)

    @classmethod
    def posed(cls, items: NDArray[Any], unseen_weight: float, l2: float) -> Self:
        """With the Gram matrix that the items have."""
        wide = items.astype(np.float64)
        return cls(items, (wide.T @ wide / len(items)).astype(np.float32), unseen_weight, l2)

    def vectors(self, users: Sequence[Likes]) -> Floats:
        """The users' best vectors, float32 [users, K]; zeros for one without items.

        Raises LearnerError where an item is not finite, or there is no minimum.
        """
        width = self.items.shape[1]
        nothing = np.zeros((len(users), width), dtype=np.float32)
        return self.improved(users, nothing, width)

    def improved(self, users: Sequence[Likes], vectors: Floats, k: int) -> Floats:
        """``vectors`` [users, K], each made better by a round's work on k columns: those in which
        one step alone would lower the user's loss most. Raises LearnerError."""
        found = vectors.copy()
        for place, likes in enumerate(users):
            if len(likes.rows):
                found[place] = self._better(self._own(likes.rows), likes.weights, vectors[place], k)
        return found

    def trained(
        self, users: Sequence[Likes], vectors: Floats, k: int
    ) -> tuple[Floats, dict[str, NDArray[Any]]]:
        """A round of a device: its ``vectors``, :meth:`improved`, and what it hands in of them.

        That are the tensors of an update; see ``contract.py``. Raises LearnerError.
        """
        if len(users) > MOST_USERS:
            raise LearnerError(f"{len(users)} users on one device; {MOST_USERS} fit")
        some = [place for place, likes in enumerate(users) if len(likes.rows)]
        found, residuals = vectors.copy(), []
        for place in some:
            own, weights = self._own(users[place].rows), users[place].weights
            vector = found[place] = self._better(own, weights, vectors[place], k)
            residuals.append(weights * (own @ vector - 1))
        rows, pulls, counts, factor = _summed(
            [users[each].rows for each in some], residuals, found[some]
        )
        return found, {
            "rows": rows,
            "pulls": pulls,
            "factor": factor,
            "counts": counts,
            "users": np.asarray(len(some), dtype=np.int64),
            "k": np.asarray(k, dtype=np.int64),
        }

    def _better(self, own: Floats, weights: Floats, vector: Floats, k: int) -> Floats:
        unseen = self.unseen_weight * len(self.items)
        norm = self.l2 * (float(weights.sum()) + unseen)
        gram = np.float32(unseen) * self.gram

        def bend(change: Floats) -> Floats:
            """The Hessian's product."""
            bent = gram @ change + own.T @ (weights * (own @ change)) + np.float32(norm) * change
            return bent.astype(np.float32, copy=False)

        # Half the descent at the vector.
        slope: Floats = own.T @ weights - bend(vector)
        columns, part = np.arange(len(vector)), own
        if k < len(vector):
            curvature = np.diagonal(gram) + np.einsum("ij,ij,i->j", own, own, weights) + norm
            columns = np.sort(np.argpartition(slope**2 / curvature, -k)[-k:])
            part = own[:, columns]
        system = (gram[np.ix_(columns, columns)] + part.T @ (weights[:, None] * part)).astype(float)
        system[np.diag_indices(len(columns))] += norm
        change = np.zeros(len(vector), dtype=np.float32)
        try:
            change[columns] = np.linalg.solve(system, slope[columns])
        except np.linalg.LinAlgError:
            raise LearnerError(_UNSOLVED, Reason.NOT_FINITE) from None
        if k < len(vector):
            change += _conjugate(bend, slope - bend(change), curvature.astype(np.float32))
        if not np.isfinite(change).all():
            raise LearnerError(_UNSOLVED, Reason.NOT_FINITE)
        return vector + change

    def _own(self, rows: Rows) -> Floats:
        own = self.items[rows].astype(np.float32, copy=False)
        if not is_finite(own):
            raise LearnerError("the broadcast's 'items' hold values that are not finite")
        return own


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


_STEPS = 4


def _conjugate(bend: Callable[[Floats], Floats], slope: Floats, curvature: Floats) -> Floats:
    """The change after a few steps of conjugate gradients from where the descent is ``slope``, with
    the Hessian's diagonal for a preconditioner."""
    change = np.zeros_like(slope)
    along: Floats = slope / curvature
    gain = slope @ along
    for _ in range(_STEPS):
        if not gain > 0:
            break  # it is the minimum
        bent = bend(along)
        length = gain / (along @ bent)
        change += length * along
        slope = (slope - length * bent).astype(np.float32, copy=False)
        ahead = slope / curvature
        gain, before = slope @ ahead, gain
        along = (ahead + (gain / before) * along).astype(np.float32, copy=False)
    return change


def _sound_gram(gram: NDArray[np.float64]) -> Floats:
    """The Gram matrix, [K, K], as it came. Raises LearnerError for one that is no matrix's: not
    finite, not symmetric, or not positive."""
    # float16 has rounded it by at most 2^-11 of its trace, or of its least number above 0.
    rounding = 2.0**-10 * max(float(np.trace(gram)), 0.0) + 1e-6
    sound = np.isfinite(gram).all() and bool((np.abs(gram - gram.T) <= rounding).all())
    if sound:
        try:
            np.linalg.cholesky(gram + rounding * np.eye(len(gram)))
            return gram.astype(np.float32)
        except np.linalg.LinAlgError:
            pass
    raise LearnerError(
        f"the broadcast's {GRAM!r} is no Gram matrix: it is expected to be finite, symmetric and "
        "positive"
    )


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
    "a user's vector has no finite solution: the broadcast's items or their Gram matrix are no "
    "model's"
)


def items_of(model: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """V, [items, K], of a broadcast's tensors. Raises LearnerError where it is not there, or of no
    width."""
    items = model.get("items")
    if items is None or items.ndim != 2 or items.dtype not in (np.float32, np.float16):
        raise LearnerError("the broadcast lacks 'items', float32 or float16 of [items, K]")
    if items.shape[1] == 0:
        raise LearnerError("the broadcast's 'items' have no columns")
    return items
