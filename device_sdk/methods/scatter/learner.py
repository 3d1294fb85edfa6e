"""The device's half of scatter aggregation: a step on the columns it can afford.

Method: "Compute-adaptive, model-heterogeneous federated recommendation" (the patent in our papers),
steps 1 to 5. The item matrix V [items, K] comes with the broadcast; the vectors U [users, K] of the
device's own users never leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.learner import Learner, LearnerError, State
from device_sdk.methods.scatter.contract import BprTraining, LeastSquaresTraining, loss_of
from device_sdk.methods.scatter.factor_step import Blocks, FactorBatch, FactorStep, is_finite
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes, items_of
from device_sdk.methods.scatter.triples import LocalTriples, PoolSettings, Triples
from device_sdk.methods.state import Entry, unpack
from device_sdk.recommend import top_items
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.publish.report import Reason

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


_TOGETHER_BYTES = 4 << 20
"""Of what a batch of devices takes at a time: more does not stay in a processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What a device enters a round with, and drew for it.

    ``users``: U, float32 [users, K], which stays as it is; ``columns``: int64 [k], increasing.
    ``pool`` and ``deck`` are what the learner keeps of the draws.
    """

    users: Floats
    columns: Rows
    triples: Triples
    pool: Rows
    deck: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """What a step made of it.

    ``users``: the new U; ``rows``: int64 [r], increasing, the items that the triples name;
    ``values``: float32 [r, k], the gradients of their drawn columns, summed over the triples.
    """

    users: Floats
    rows: Rows
    values: Floats


def descend(
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved | LearnerError]:
    """One step of each device at ``items``, float16 or float32 [items, K]; their order is kept."""
    found: dict[int, Moved | LearnerError] = {}
    for batch in _batches(drawn, items.shape):
        moved = _apart(items, training, step, [drawn[place] for place in batch])
        found.update(zip(batch, moved, strict=True))
    return [found[place] if place in found else _unmoved(one) for place, one in enumerate(drawn)]


def _unmoved(drawn: Drawn) -> Moved:
    """Of a device without triples."""
    values = np.empty((0, len(drawn.columns)), dtype=np.float32)
    return Moved(drawn.users, np.empty(0, dtype=np.int64), values)


def _batches(drawn: Sequence[Drawn], shape: tuple[int, ...]) -> Iterator[list[int]]:
    """Places of devices that have triples, and may take a step together."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, one in enumerate(drawn):
        if len(one.triples):
            # The number of its users may say how a device computes: see StepByUsers.
            alike.setdefault((len(one.columns), len(one.users) == 1), []).append(place)
    for places in alike.values():
        batch: list[int] = []
        size = 0
        for place in places:
            triples, users = len(drawn[place].triples), len(drawn[place].users)
            more = 9 * shape[0] + 8 * triples * (shape[1] + users)
            if batch and size + more > _TOGETHER_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += more
        yield batch


def _apart(
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> Sequence[Moved | LearnerError]:
    """A batch's steps; where one of them fails, each half is tried by itself."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
            return _together(items, training, step, drawn)
    except LearnerError as error:
        if len(drawn) == 1:
            return [error]
    half = len(drawn) // 2
    return [
        *_apart(items, training, step, drawn[:half]),
        *_apart(items, training, step, drawn[half:]),
    ]


def _together(
    items: NDArray[Any], training: BprTraining, step: FactorStep, drawn: Sequence[Drawn]
) -> list[Moved]:
    """A batch's steps in one. Raises LearnerError where one device's fails."""
    all_of = _laid(drawn, len(items))
    users, triples, blocks = all_of.users, all_of.triples, all_of.blocks
    touched = items.take(all_of.rows, axis=0).astype(np.float32, copy=False)
    if not is_finite(touched):
        raise LearnerError("the broadcast's 'items' hold values that are not finite")
    offset = np.zeros(len(triples), dtype=np.float32)
    some_users, some_items = users, touched
    partial = len(drawn[0].columns) < items.shape[1]
    if partial:
        columns = np.array([one.columns for one in drawn]).repeat(all_of.counts, axis=0)
        places = np.arange(len(users))[:, None], columns
        some_users = users[places]
        parts = zip(drawn, blocks, strict=True)
        some_items = np.concatenate(
            [touched[rows].take(one.columns, 1) for one, (_, rows, _) in parts]
        )
        if training.scores == "residual":
            # Constant over the step, so that the drawn columns fit what the others leave over.
            rest = users.copy()
            rest[places] = 0
            offset = blocks.margins(rest, touched, triples.user, triples.positive, triples.negative)
    batch = FactorBatch(
        triples.user, triples.positive, triples.negative, triples.weight, offset,
        training.user_l2, training.item_l2, blocks,
    )  # fmt: skip
    gradients = step.gradients(some_users, some_items, batch)
    sizes = np.bincount(triples.user, triples.weight, len(users))
    # A sum over n triples grows like n, its noise like sqrt(n): this rate suits users of any n.
    rates = (training.user_learning_rate / np.sqrt(np.maximum(sizes, 1))).astype(np.float32)
    some_users = some_users - rates[:, None] * gradients.users
    if partial:
        users[places] = some_users
    else:
        users = some_users
    if not is_finite(users):
        raise LearnerError(
            "training diverged: a user's vector is not finite; lower the rates",
            Reason.NOT_FINITE,
        )
    return [
        Moved(users[mine].copy(), all_of.rows[rows], gradients.items[rows])
        for mine, rows, _ in blocks
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """Devices side by side: ``users`` [all users, K], a copy, and ``rows`` of the catalogue
    [all rows], of which ``triples`` name the places. ``counts``: users by device."""

    users: Floats
    counts: list[int]
    rows: Rows
    triples: Triples
    blocks: Blocks


def _laid(drawn: Sequence[Drawn], catalogue: int) -> _Laid:
    counts = [len(one.users) for one in drawn]
    # As if each device had a catalogue of its own.
    catalogues = [catalogue] * len(drawn)
    named, positive, negative = touched_rows(
        _joined([one.triples.positive for one in drawn], catalogues),
        _joined([one.triples.negative for one in drawn], catalogues),
        catalogue * len(drawn),
    )
    begins = np.arange(len(drawn)) * catalogue
    ends = [*named.searchsorted(begins[1:]).tolist(), len(named)]
    own_rows = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return _Laid(
        users=np.concatenate([one.users for one in drawn]),
        counts=counts,
        rows=named - begins.repeat(own_rows),
        triples=Triples(
            _joined([one.triples.user for one in drawn], counts),
            positive,
            negative,
            np.concatenate([one.triples.weight for one in drawn]),
        ),
        blocks=Blocks(counts, own_rows),
    )


def _joined(parts: Sequence[Rows], sizes: Sequence[int]) -> Rows:
    """Numbers of what each device has ``sizes`` of, counted through all devices, in one array."""
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, dtype=np.int64)
    return np.concatenate(parts) + begins.repeat([len(part) for part in parts])


def touched_rows(positive: Rows, negative: Rows, catalogue: int) -> tuple[Rows, Rows, Rows]:
    """The distinct items, increasing, and where each of ``positive`` and ``negative`` lies in them.

    All int64. A table over the catalogue is several times faster than sorting.
    """
    is_touched = np.zeros(catalogue, dtype=np.bool_)
    is_touched[positive] = True
    is_touched[negative] = True
    rows = np.flatnonzero(is_touched)
    place = np.empty(catalogue, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    return rows, place.take(positive), place.take(negative)


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
        tensors = problem.trained(likes, min(self.columns, width))
        self._pool = pool
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
        fresh = self._rng.standard_normal((count - len(known), width), dtype=np.float32)
        return np.concatenate([known, np.float32(spread) * fresh])
