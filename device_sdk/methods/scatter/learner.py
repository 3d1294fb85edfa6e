"""The device's half of scatter aggregation: a step on the columns it can afford.

Method: "Compute-adaptive, model-heterogeneous federated recommendation" (the patent in our papers),
steps 1 to 5. The item matrix V [items, K] comes with the broadcast; the vectors U [users, K] of the
device's own users never leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import Learner, LearnerError, State
from device_sdk.methods.scatter.contract import BprTraining, LeastSquaresTraining, loss_of
from device_sdk.methods.scatter.descent import Drawn, Moved, descend
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes, items_of
from device_sdk.methods.scatter.triples import LocalTriples, PoolSettings
from device_sdk.methods.state import Entry, unpack
from device_sdk.recommend import top_items
from device_sdk.wire.arrays.exchange import Broadcast, Update

# Which columns of the factor matrices a device trains this round.

Columns = NDArray[np.int64]


def deal_columns(
    deck: Columns, total: int, count: int, rng: np.random.Generator
) -> tuple[Columns, Columns]:
    """This round's columns, increasing, and what is left of the deck for the next rounds.

    Columns are fresh each round (the patent's "feature filter layer", steps 2 and 3), but dealt
    like cards: from a shuffled deck of all ``total`` columns, and only when it runs out are they
    shuffled again. A device with few columns so reaches each part of its vectors equally often,
    which independent draws do not; on MovieLens 100K that is worth a point of HR@10.

    Args:
        deck: columns still to deal, from the last call; empty at the start.
        total: K.
        count: k_i; all columns come where it reaches ``total``.
        rng: shuffles.
    """
    if count >= total:
        return np.arange(total, dtype=np.int64), deck[:0]
    hand = deck[:count]
    rest = deck[count:]
    if len(hand) < count:
        fresh = rng.permutation(left_out(total, hand))
        missing = count - len(hand)
        hand, rest = np.concatenate([hand, fresh[:missing]]), fresh[missing:]
    return np.sort(hand), rest


def left_out(total: int, columns: Columns) -> Columns:
    """The columns that are not in ``columns``, increasing."""
    out = np.ones(total, dtype=np.bool_)
    out[columns] = False
    return np.flatnonzero(out)


Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


class LocalPositives(Protocol):
    """The device's own training data, asked for at the start of each round."""

    def positives(self) -> Sequence[Rows]:
        """Per local user the distinct item rows it interacted with, int64.

        Users keep their place from call to call; new ones are appended.
        """


class ScatterLearner(Learner):
    """Trains one device's users on ``columns`` of the K columns, fresh ones each round.

    Args:
        interactions: the local users' training data.
        step: computes the gradients (:class:`~device_sdk.methods.scatter.factor_step.StepByUsers`).
        columns: k_i, the number of columns this device can afford; more than K means all.
        rng: source of every draw: columns, negatives, pool, new users' vectors.
        pool: the device's own choice of what to mix in for privacy.

    Raises ValueError when ``columns`` is below 1.
    """

    def __init__(
        self,
        interactions: LocalPositives,
        step: FactorStep,
        columns: int,
        rng: np.random.Generator,
        pool: PoolSettings | None = None,
    ) -> None:
        self._interactions = interactions
        self._step = step
        self._rng = rng
        self._triples = LocalTriples(pool if pool is not None else PoolSettings())
        self._users: Floats = np.empty((0, 0), dtype=np.float32)
        self._pool: Rows = np.empty(0, dtype=np.int64)
        self._deck: Rows = np.empty(0, dtype=np.int64)
        if columns < 1:
            raise ValueError(f"a device with {columns} columns cannot train; expected at least 1")
        self.columns = columns
        """k_i, 1 or more. May be set between rounds, when the device was timed again."""

    @property
    def rng(self) -> np.random.Generator:
        """The source of every draw. May be set between rounds: a simulator gives each its own."""
        return self._rng

    @rng.setter
    def rng(self, rng: np.random.Generator) -> None:
        self._rng = rng

    @property
    def users(self) -> Floats:
        """U as training left it, float32 [users, K]: a copy. Empty before the first round."""
        return self._users.copy()

    def vectors(self, broadcast: Broadcast) -> Floats:
        """The local users' vectors at full width, float32 [users, K], to recommend with from the
        broadcast's items: of least squares its solution, else U as it was trained.

        Raises LearnerError for a broadcast that holds no model.
        """
        if self.personalises(broadcast):
            return self.users
        problem = LeastSquares.of(broadcast.tensors)
        return problem.vectors([Likes.of(rows) for rows in self._interactions.positives()])

    def personalises(self, broadcast: Broadcast) -> bool:
        """Whether training leaves other :meth:`vectors` than the device came with."""
        return loss_of(broadcast.settings) != LeastSquaresTraining.LOSS

    def train(self, broadcast: Broadcast) -> Update:
        """One step over the device's data; see :class:`~device_sdk.methods.learner.Learner`.

        The update holds the tensors of the broadcast's loss: see ``contract.py``. A device without
        interactions sends an update of no rows.

        Raises LearnerError when the broadcast lacks ``items`` or settings, or when the catalogue
        is too short for the local data; the learner is then unchanged.
        """
        (found,) = self.train_many((self,), broadcast)
        if isinstance(found, LearnerError):
            raise found
        return found

    @classmethod
    def train_many(
        cls, learners: Sequence[Self], broadcast: Broadcast
    ) -> Sequence[Update | LearnerError]:
        """See :class:`~device_sdk.methods.learner.Learner`; those of one step and k train together.

        NumPy's step gives each the very bits that it has alone, the graph's rounds otherwise.
        """
        if loss_of(broadcast.settings) == LeastSquaresTraining.LOSS:
            return cls._solve_many(learners, broadcast)
        try:
            items = items_of(broadcast.tensors)
            training = BprTraining.from_scalars(broadcast.settings, LearnerError)
        except LearnerError as error:
            return [error] * len(learners)
        found: dict[int, Update | LearnerError] = {}
        drawn: dict[int, Drawn] = {}
        by_step: dict[int, list[int]] = {}
        for place, learner in enumerate(learners):
            try:
                drawn[place] = learner._draw(items, training)
            except LearnerError as error:
                found[place] = error
                continue
            by_step.setdefault(id(learner._step), []).append(place)
        for places in by_step.values():
            step = learners[places[0]]._step
            moved = descend(items, training, step, [drawn[place] for place in places])
            for place, one in zip(places, moved, strict=True):
                if isinstance(one, LearnerError):
                    found[place] = one
                else:
                    found[place] = learners[place]._keep(broadcast.round_id, drawn[place], one)
        return [found[place] for place in range(len(learners))]

    def _draw(self, items: NDArray[Any], training: BprTraining) -> Drawn:
        """All of a round that is random. Raises LearnerError."""
        positives = self._interactions.positives()
        users = self._grown_users(len(positives), items.shape[1], training.user_spread)
        pool, source = self._triples.of(positives, len(items), self._pool, self._rng)
        triples = source.draw(training.most_triples, self._rng)
        deck = self._deck if items.shape[1] == self._users.shape[1] else self._deck[:0]
        columns, deck = deal_columns(deck, items.shape[1], self.columns, self._rng)
        return Drawn(users, columns, triples, pool, deck)

    def _keep(self, round_id: int, drawn: Drawn, moved: Moved) -> Update:
        """Commit to a round's outcome."""
        self._users, self._pool, self._deck = moved.users, drawn.pool, drawn.deck
        return Update(
            round_id,
            {"columns": drawn.columns, "rows": moved.rows, "values": moved.values},
        )

    @classmethod
    def _solve_many(
        cls, learners: Sequence[Self], broadcast: Broadcast
    ) -> Sequence[Update | LearnerError]:
        found: list[Update | LearnerError] = []
        try:
            LeastSquaresTraining.from_scalars(broadcast.settings, LearnerError)
            problem = LeastSquares.of(broadcast.tensors)
        except LearnerError as error:
            return [error] * len(learners)
        for learner in learners:
            try:
                found.append(learner._solved(problem, broadcast.round_id))
            except LearnerError as error:
                found.append(error)
        return found

    def _solved(self, problem: LeastSquares, round_id: int) -> Update:
        """A round of least squares. Raises LearnerError."""
        positives, (items, width) = self._interactions.positives(), problem.items.shape
        pool, parts = self._triples.pseudo_items(positives, items, self._pool, self._rng)
        weight = self._triples.settings.pseudo_weight
        likes = [
            Likes.of(own, pseudo, weight) for own, pseudo in zip(positives, parts, strict=True)
        ]
        k = min(self.columns, width)
        vectors, tensors = problem.trained(likes, self._grown_users(len(likes), width, 0.0), k)
        self._users, self._pool, self._deck = vectors, pool, self._deck[:0]
        return Update(round_id, tensors)

    def recommend(self, items: NDArray[Any], user: int, count: int) -> list[tuple[int, float]]:
        """The ``count`` best items that local user ``user`` has not touched: (row, score), best
        first (the patent, step 5).

        All K columns take part, whatever number of them this device trains. ``items`` is the last
        item matrix, float16 or float32 [items, K]. Raises LearnerError when the user has no vector
        of that width yet, ValueError for a negative count.
        """
        if not 0 <= user < len(self._users) or items.shape[1] != self._users.shape[1]:
            raise LearnerError(
                f"user {user} has no vector of {items.shape[1]} columns: it gets one in its first "
                "round"
            )
        scores = items.astype(np.float32, copy=False) @ self._users[user]
        return top_items(scores, self._interactions.positives()[user], count)

    def state(self) -> State:
        """``users`` float32 [users, K]; ``pool`` and ``deck`` (columns still to deal), int64."""
        return {
            "users": self._users.copy(),
            "pool": self._pool.copy(),
            "deck": self._deck.copy(),
        }

    def restore(self, state: State) -> None:
        """Take ``state()`` back; raises LearnerError where names, dtypes or shapes do not fit."""
        distinct = Entry(np.int64, ("dealt",), least=0)
        schema = {
            "users": Entry(np.float32, ("users", "K")),
            "pool": replace(distinct, shape=("pooled",)),
            "deck": replace(distinct, below="K"),
        }
        found = unpack(schema, state, error=LearnerError)
        for name in ("pool", "deck"):
            if len(np.unique(found[name])) != len(found[name]):
                raise LearnerError(f"the state's {name!r} is expected to hold no number twice")
        self._users, self._pool, self._deck = found["users"], found["pool"], found["deck"]

    def _grown_users(self, count: int, width: int, spread: float) -> Floats:
        """U with a row for every user; all new where K is another than before."""
        known = self._users if self._users.shape[1] == width else np.empty((0, width), np.float32)
        if len(known) >= max(count, 1):
            return known
        if not spread:
            return np.concatenate([known, np.zeros((count - len(known), width), np.float32)])
        fresh = self._rng.standard_normal((count - len(known), width), dtype=np.float32)
        return np.concatenate([known, np.float32(spread) * fresh])
