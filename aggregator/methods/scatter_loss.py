"""What a scatter task minimises, the aggregator's half: how a round's sums become a step.

A loss reads its updates, adds up what it needs beside the sum of gradients, and moves the items.
Bounds, robust means, columns, restarts and shards are the method's, and alike for every loss.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Judged, NormBounding
from aggregator.methods.fleet import euclidean_norm
from aggregator.methods.method import FLOAT32, Arrays, Refused, require_floats
from aggregator.methods.robust import RobustRule, touched_means
from aggregator.methods.server_optimizer import OptimizerSettings, ServerOptimizer
from aggregator.methods.sums import MOST_UPDATES, Additive, FixedPointSum
from device_sdk.fields import Declared, Within
from device_sdk.methods.scatter.contract import (
    BPR_TENSORS,
    LEAST_SQUARES_TENSORS,
    SOLVE,
    STRENGTHS,
    BprTraining,
    LeastSquaresTraining,
)
from device_sdk.methods.state import COUNT, Entry, Schema, State, unpack
from device_sdk.wire.arrays.exchange import Scalar, Update
from device_sdk.wire.arrays.factored import MOST_USERS
from device_sdk.wire.arrays.sparse import MAX_WIDTH
from device_sdk.wire.arrays.tensors import halved

Counts = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


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

    def turned(self, items: Floats) -> Floats:
        """The items as they are kept and told, whenever they are others. Here: as they are."""
        return items

    def model(self) -> Arrays:
        """What a version's model holds beside ``items``. Here: nothing."""
        return {}

    def bound_by(self, limits: NormBounding) -> None:
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


# Implicit least squares.

Hashes = NDArray[np.uint64]
_INT64 = np.dtype(np.int64)
_UNIT = 1 << 20
"""A user counts as so many units, fewer where its update is scaled down: 2^16 users of a device and
2^24 devices stay within 2^60."""
_LARGEST_FACTOR = 1e6
"""Of any user's vector that trains, far above."""
_LENGTH, _USERS, _LIKES = 0, 1, 2
"""Measures of an update."""
_LONG_LISTS = 4
"""Multiples of lengths that a list may be longer than the fleet's median one: lists of honest users
differ more than anything else does."""
_LITTLE = 1e-12
_HABIT = 0.9
"""Of how common an item was, what counts a pass over the fleet later."""
_SILENT = 0.01
"""Of what was ever heard of an item, what was heard lately: of one that its users have no longer,
after five to eight passes without them."""
_ENOUGH = 4
"""Users a column that a mean of outer products takes."""
_STRAIGHT = 1e-6
"""Of the largest square, products of columns that float32's rounding may leave."""
_FULL = 0.4
"""Of the width: an effective dimension above it gains from more columns."""


@dataclass(frozen=True, slots=True)
class LeastSquaresSettings(Declared):
    """Settings of implicit least squares.

    Attributes:
        unseen_weight: a0, what the square of any item's score weighs beside an error on an item of
            a user's own, which weighs 1; 0: by rule, see :func:`weights_by_rule`.
        l2: lambda, of the vectors' squared norms, times their frequency; 0: by rule, likewise.
        most_columns: the model's width doubles up to this while the data carry more: while the
            effective dimension of the users' vectors, tr M (M + lambda)^-1, is above four tenths
            of the width. 0: the width stays as it is.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    unseen_weight: Annotated[float, Within(1e-4, 1e3, or_zero=True)] = 0.0
    l2: Annotated[float, Within(1e-4, 1e3, or_zero=True)] = 0.0
    most_columns: Annotated[int, Within(0, MAX_WIDTH)] = 256


def weights_by_rule(common: Doubles, users: float, unseen_weight: float = 0.0) -> Doubles:
    """a0 and lambda, float64 [2], for data of which nothing but these is known.

    Args:
        common: by item the share of users who have it, float64 [items].
        users: how many there are.
        unseen_weight: a0, where it is chosen.

    a0 is six times the density, at most 1. With each user's row of the data divided by the root of
    its weight |L| + a0 |I|, and each item's column by that of p_i + a0, what chance alone makes of
    the spectrum ends at an edge (that of a matrix of independent entries, by their variances: Bai
    and Silverstein 2010, "Spectral analysis of large dimensional random matrices", chapter 5);
    lambda is in proportion to it, and larger where users have few items, but at most half of what
    popularity alone makes of the spectrum: of a few users nothing else may be left. The factors 6,
    0.28 and 10 were chosen on validation items: see ``docs/methods/scatter.md``.
    """
    own = float(common.sum())
    if not own:
        return np.array([unseen_weight or 0.1, 0.02])
    a0 = unseen_weight or min(1.0, 6 * own / len(common))
    kept, weight = common / (common + a0), math.sqrt(own + a0 * len(common))
    popular = math.sqrt(float((common * kept).sum()))
    edge = math.sqrt(float(kept.sum()) / max(users, 1)) + popular / math.sqrt(own)
    l2 = min(0.28 * (1 + 10 / own) * edge, 0.5 * popular) / weight
    return np.array([a0, max(1e-4, l2)])


_SKETCH = 1024
_HASHES = float(1 << 64)
_ERA = 4
"""Updates a device: of those drawn at random, 2 % were not drawn by then."""


class DistinctSenders(Additive):
    """How many devices were counted lately, from the 1,024 least hashes of their names.

    Exact below 1,024; above it a k-minimum-values sketch (Bar-Yossef et al. 2002, algorithm 1),
    some 3 % off. Lately is this era and the one before: an era ends when those who were counted in
    it were so four times each, as by then all who still come have. So devices that are gone, or
    have other names now, are forgotten after a few passes of the others. A round that is given up
    leaves no trace.
    """

    FRESH = True

    def __init__(self) -> None:
        self._earlier: Hashes = np.empty(0, dtype=np.uint64)
        self._settled: Hashes = np.empty(0, dtype=np.uint64)
        self._updates = 0
        """Of this era."""
        self._recent: set[int] = set()

    def note(self, sender: str) -> None:
        """An update of this device counts. One without a name is nobody's."""
        if sender:
            digest = blake2b(bytes.fromhex(sender), digest_size=8).digest()
            self._recent.add(int.from_bytes(digest, "little"))
            if len(self._recent) > 4 * _SKETCH:
                self._recent = set(sorted(self._recent)[:_SKETCH])

    @property
    def count(self) -> float:
        """With those of this round."""
        return _distinct(_least(self._earlier, self._with_recent()))

    def begin(self, round_id: int) -> None:
        self._recent = set()

    def close(self, updates: int) -> None:
        """The round of so many updates makes a version."""
        self._settled, self._updates = self._with_recent(), self._updates + updates
        self._recent = set()
        if self._updates >= _ERA * _distinct(self._settled):
            self._earlier, self._settled, self._updates = self._settled, self._settled[:0], 0

    def _with_recent(self) -> Hashes:
        return _least(self._settled, np.array(sorted(self._recent), dtype=np.uint64))

    def state(self) -> dict[str, NDArray[Any]]:
        """``earlier``, ``settled`` and ``recent``, uint64-as-int64 [devices], at most 1,024 each,
        rising; ``updates``, of this era."""
        return {
            "earlier": self._earlier.view(np.int64).copy(),
            "settled": self._settled.view(np.int64).copy(),
            "updates": np.asarray(self._updates, dtype=np.int64),
            **self.share(),
        }

    def share(self) -> dict[str, NDArray[Any]]:
        """``recent`` alone."""
        recent = np.array(sorted(self._recent)[:_SKETCH], dtype=np.uint64)
        return {"recent": recent.view(np.int64)}

    def restored(self, state: State) -> DistinctSenders:
        """See :class:`~device_sdk.methods.state.Stateful`."""
        found = DistinctSenders()
        if state:
            hashes = {n: Entry(np.int64, (n,)) for n in ("earlier", "settled", "recent")}
            arrays = unpack({**hashes, "updates": COUNT}, state)
            found._earlier = _least(arrays["earlier"].view(np.uint64))
            found._settled = _least(arrays["settled"].view(np.uint64))
            found._updates = int(arrays["updates"])
            found._recent = set(arrays["recent"].view(np.uint64).tolist())
        return found

    def _read(self, share: State) -> dict[str, Any]:
        return unpack({"recent": Entry(np.int64, ("hashes",))}, share)

    def _add(self, found: Mapping[str, Any]) -> None:
        self._recent |= set(found["recent"].view(np.uint64).tolist())


def _least(*hashes: Hashes) -> Hashes:
    """The least of all, each once, rising."""
    found: Hashes = np.unique(np.concatenate(hashes))[:_SKETCH]
    return found


def _distinct(known: Hashes) -> float:
    """How many there were, of whom these are the least."""
    if len(known) < _SKETCH:
        return float(len(known))
    return (_SKETCH - 1) * _HASHES / (float(known[-1]) + 1)


class LeastSquaresLoss(ScatterLoss):
    """Implicit least squares over a fleet: exact negatives by summed Gram matrices, one Newton-like
    step a round.

    With p_i the share of users who have item i, M the mean of their vectors' outer products u u',
    and e = u.v - 1 a user's residual on an item of its own, the fleet's loss a user is (Hu, Koren
    and Volinsky 2008, eq. 3; frequency-scaled norms by Rendle et al. 2022, "Revisiting the
    performance of iALS on item recommendation benchmarks", section 3.3)

        mean over users of (sum over own items of e^2 + a0 sum over all items of (u.v)^2)
            + lambda sum over items of (p_i + a0) |v_i|^2.

    Half its gradient in v_i is g_i + a0 M v_i + lambda (p_i + a0) v_i, with g_i the mean over
    users of e u, and its Hessian, with u u' of the item's own users taken for everybody's, (a0 +
    p_i) (M + lambda): one K x K system for all items. M is the exact pull of every item that a
    user has not, and no item is drawn as a negative.

    A round hears some of the users. It moves an item as far as they are of those who were heard
    of it lately: t of them, where w were heard, by t / w of the step, so that the item is the
    mean of what its users say one after another. Of w half is forgotten in each pass over the
    fleet: where all users come in each round, the first one goes all the way, and later ones half
    of it.

    Items are kept in their principal axes (:meth:`turned`), and told as X and S of their singular
    value decomposition: to a device that makes V'V a diagonal, and of the first k columns the best
    approximation of rank k. Devices of any k hand in all K columns, for a user's residuals say as
    much of each: so nothing here depends on who trained which.

    Args:
        shape: of V, [items, K].
        settings: of the task.
        spread: standard deviation of a new item's vector.
    """

    TENSORS = LEAST_SQUARES_TENSORS
    MEASURES = 3
    PARTS = ("gram", "senders")
    ADDED = ("people", "named")
    _people: int
    _named: Counts

    def __init__(
        self, shape: tuple[int, int], settings: LeastSquaresSettings, spread: float = 0.01
    ) -> None:
        self.shape, self._settings, self._spread = shape, settings, spread
        self._seen: Doubles = np.zeros(shape[0])
        self._seen_by = 0.0
        self._senders = DistinctSenders()
        self._users = self._dimension = 0.0
        self._heard: Doubles = np.zeros(shape[0])
        self._outer: Doubles = np.zeros((shape[1], shape[1]))
        self._outer_heard = 0.0
        self._most_length = self._limit = self._most_users = self._most_likes = math.inf
        self._gram: FixedPointSum | None = None
        self.begin(0)

    def turned(self, items: Floats) -> Floats:
        """In their principal axes, the strongest first: a turn of all vectors, users' and items',
        changes no score."""
        wide = items.astype(np.float64)
        squares = wide.T @ wide
        lengths = np.diagonal(squares)
        apart, most = squares - np.diag(lengths), _STRAIGHT * lengths.max()
        if np.abs(apart).max() <= most and (np.diff(lengths) <= most).all():
            return items  # a version that is gone back to is the same to the bit
        turn = np.linalg.eigh(squares)[1][:, ::-1]
        self._outer = turn.T @ self._outer @ turn
        found: Floats = (wide @ turn).astype(np.float32)
        return found

    def told(self, items: Floats) -> tuple[Arrays, Mapping[str, Scalar]]:
        squares = np.einsum("ij,ij->j", items, items, dtype=np.float64) / len(items)
        strengths = halved(np.sqrt(squares).astype(np.float32))
        tensors: Arrays = {
            "items": items / np.where(strengths > 0, strengths, np.inf).astype(np.float32),
            STRENGTHS: strengths,
            SOLVE: self._weights().astype(np.float16),
        }
        return tensors, LeastSquaresTraining().as_scalars()

    def model(self) -> Arrays:
        return {SOLVE: self._weights().astype(np.float32)}

    def bound_by(self, limits: NormBounding) -> None:
        self._most_length = limits.absurd_length(_LENGTH, self._usual_length)
        self._limit = limits.most_length(_LENGTH, self._usual_length)
        self._most_users = limits.multiple * limits.usual(_USERS) or math.inf
        self._most_likes = _LONG_LISTS * limits.multiple * limits.usual(_LIKES) or math.inf

    def go_on_from(self, before: ScatterLoss) -> None:
        assert isinstance(before, LeastSquaresLoss)
        self._seen, self._seen_by = before._seen, before._seen_by
        self._users, self._senders = before._users, before._senders
        self._heard = before._heard

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._columns: Counts = np.arange(self.shape[1])
        self._adds_up = 0
        self._robust: Doubles | None = None
        self._gram = None

    def begin_sums(self) -> None:
        width = self.shape[1]
        self._adds_up = 1
        self._gram = FixedPointSum((width, width), min(self._limit, self._most_length) ** 2)

    def columns(self, update: Update) -> Counts:
        return self._columns

    def trained(self, update: Update) -> int:
        return int(update.tensors["k"])

    def squares(self, update: Update) -> float:
        tensors, width = update.tensors, self.shape[1]
        pulls, factor, counts = tensors["pulls"], tensors["factor"], tensors["counts"]
        users, rows = _number(tensors, "users", 0, MOST_USERS), len(tensors["rows"])
        _number(tensors, "k", 1, width)
        height = len(factor) if factor.ndim else -1
        require_floats("pulls", pulls, (rows, height))
        require_floats("factor", factor, (height, width))
        if height > min(users, width):
            raise Refused("bad-users", "the factor has more rows than users, or than columns")
        if counts.dtype != _INT64 or counts.shape != (rows,):
            raise Refused("bad-counts", f"expected int64 of [{rows}]")
        if rows and not 1 <= counts.min() <= counts.max() <= users:
            raise Refused("bad-counts", "a row was touched by at least one user and by all at most")
        pull, length = pulls.reshape(-1), factor.reshape(-1)
        squares = float(length.dot(length))
        # Of what is not finite, too.
        if not squares <= min(self._most_length, _LARGEST_FACTOR) ** 2:
            raise Refused("bad-values", "the users' vectors are not finite or absurdly large")
        return float(pull.dot(pull)) * squares

    def values(self, update: Update) -> Floats:
        pulls, factor = update.tensors["pulls"], update.tensors["factor"]
        found = np.zeros((len(pulls), factor.shape[1]), dtype=np.float32)
        # Not a matrix product: its order of adding, and so its bits, are the processor's own.
        for pull, row in zip(pulls.T, factor, strict=True):
            found += pull[:, None] * row
        return found

    @staticmethod
    def unfolded(update: Update) -> int:
        width = int(update.tensors["factor"].shape[1])
        return (len(update.tensors["rows"]) + width) * width * FLOAT32.itemsize

    def measures(self, update: Update) -> Measures:
        """Of the factor the length; users; items a user, on their mean."""
        tensors = update.tensors
        users = int(tensors["users"])
        likes = float(tensors["counts"].sum()) / max(1, users)
        return euclidean_norm(tensors["factor"]), float(users), likes

    def factor(self, measures: Measures) -> float:
        length = measures[_LENGTH]
        by_length = 1.0 if length <= self._limit else (self._limit / length) ** 2
        return min(by_length, self._weight(measures))

    def _weight(self, measures: Measures) -> float:
        """What each user of a device counts for: less where it has far more users than is usual, or
        they far more items. Whoever names all items says so of the fleet's density, and a0."""
        _, users, likes = measures
        weight = 1.0 if users <= self._most_users else self._most_users / users
        return weight if likes <= self._most_likes else weight * self._most_likes / likes

    def absorb(self, one: Judged) -> None:
        # Users count whatever their update was shortened by: divided by a factor, as the mean over
        # an item's few users is, what was shortened would be as long as before.
        tensors, factor = one.update.tensors, one.factor
        units = round(self._weight(one.others) * _UNIT) if factor else 0
        self._senders.note(one.update.sender)
        self._people += int(tensors["users"]) * units
        self._named[tensors["rows"]] += tensors["counts"] * units
        if self._gram is not None:
            self._gram.add(_gram_of(tensors["factor"]), factor)

    def absorb_held(self, judged: Sequence[Judged], rule: RobustRule) -> None:
        shape = self._outer.shape
        longest = max((one.others[_LENGTH] for one in judged), default=0.0)
        self._gram = FixedPointSum(shape, longest**2)
        super().absorb_held(judged, rule)
        if rule.holds:
            each = [
                (self._columns, self._columns, _gram_of(one.update.tensors["factor"]))
                for one in judged
                if one.factor
            ]
            self._robust = touched_means(each, (shape[0], shape[1]), rule)

    def step(self, items: Floats, found: RoundSum) -> tuple[Floats, dict[str, float]]:
        people, named = self._people / _UNIT, self._named / _UNIT
        # Users there are, were there as many on each device as on those of this round.
        self._users = max(people, self._senders.count * people / found.updates, 1.0)
        self._senders.close(found.updates)
        passed = people / self._users
        self._seen = _HABIT**passed * self._seen + named
        self._seen_by = _HABIT**passed * self._seen_by + people
        common, (a0, l2) = self._common, self._weights()
        values, turn = self._mean_outer(people)
        mean, inverse = (turn * values) @ turn.T, (turn / (values + l2)) @ turn.T
        # By item the mean of e u over those of its users who were heard.
        pull = found.gradient / np.maximum(named, _LITTLE)[:, None]
        wide = items.astype(np.float64)
        gradient = common[:, None] * pull + a0 * (wide @ mean)
        gradient += l2 * (common + a0)[:, None] * wide
        step = (gradient / (common + a0)[:, None]) @ inverse
        self._dimension = float((values / (values + l2)).sum())
        self._heard = 0.5**passed * self._heard + named
        share = named / np.maximum(self._heard, _LITTLE)
        moved = wide - share[:, None] * step
        silent = self._heard <= _SILENT * self._seen
        moved[silent] = self._faded(wide[silent], passed)
        return moved.astype(np.float32), {
            "gradient_norm": float(np.linalg.norm(gradient)),
            "unseen_weight": float(a0),
            "l2": float(l2),
            "effective_columns": self._dimension,
        }

    def _faded(self, items: Doubles, passed: float) -> Doubles:
        """Items that nobody has, or nobody any more: half as long a pass over the fleet, and then
        as long as a new one. Of zeros no user's vector, and so no gradient, is other than zero."""
        lengths = np.linalg.norm(items, axis=1)
        least = self._spread * math.sqrt(items.shape[1]) / np.maximum(lengths, _LITTLE)
        shorter: Doubles = items * least.clip(0.5**passed, 1)[:, None]
        return shorter

    def grow(self, items: int) -> None:
        self.shape = (self.shape[0] + items, self.shape[1])
        self._seen = np.concatenate([self._seen, np.zeros(items)])
        self._heard = np.concatenate([self._heard, np.zeros(items)])

    def width(self) -> int:
        width = self.shape[1]
        if self._dimension <= _FULL * width:
            return width
        return max(width, min(2 * width, self._settings.most_columns))

    def widen(self, columns: int) -> None:
        more = columns - self.shape[1]
        self.shape = (self.shape[0], columns)
        self._outer = np.pad(self._outer, (0, more))
        self._dimension = 0.0

    @property
    def _common(self) -> Doubles:
        """By item the share of users who have it, float64 [items]."""
        return self._seen / max(self._seen_by, 1.0)

    def _weights(self) -> Doubles:
        """a0 and lambda, float64 [2]."""
        chosen = self._settings
        a0, l2 = weights_by_rule(self._common, self._users, chosen.unseen_weight)
        return np.array([a0, chosen.l2 or l2])

    @property
    def _usual_length(self) -> float:
        return math.sqrt(self.shape[1])

    def _mean_outer(self, people: float) -> tuple[Doubles, Doubles]:
        """M, the mean of u u' over the users of this round and, where they are few for K columns,
        of those before: its eigenvalues [K], none below 0, and its eigenvectors [K, K]."""
        total = self._robust
        if total is None:
            assert self._gram is not None
            total = self._gram.value
        kept = max(0.0, 1 - people / (_ENOUGH * len(total)))
        self._outer = kept * self._outer + total
        self._outer_heard = kept * self._outer_heard + people
        mean = self._outer / max(self._outer_heard, _LITTLE)
        # Of robust means, which go by cells, the sum need not be one of squares.
        values, turn = np.linalg.eigh((mean + mean.T) / 2)
        return values.clip(0), turn

    def _schema(self) -> Schema:
        items, width = self.shape
        count = Entry(np.int64, least=0, below=MOST_UPDATES * MOST_USERS * _UNIT + 1)
        return {
            "seen": Entry(np.float64, (items,), least=0),
            "seen_by": Entry(np.float64, least=0),
            "users": Entry(np.float64, least=0),
            "dimension": Entry(np.float64),
            "heard": Entry(np.float64, (items,), least=0),
            "outer": Entry(np.float64, (width, width)),
            "outer_heard": Entry(np.float64, least=0),
            "people": count,
            "named": replace(count, shape=(items,)),
            "adds_up": COUNT,
        }

    def _parts_follow(self) -> None:
        width = self.shape[1]
        self._gram = FixedPointSum((width, width)) if self._adds_up else None


def _number(tensors: Arrays, name: str, least: int, most: int) -> int:
    found = tensors[name]
    if found.dtype != _INT64 or found.ndim or not least <= found.item() <= most:
        raise Refused("bad-users", f"{name} is expected to be an int64, {least} to {most}")
    return int(found.item())


def _gram_of(factor: Floats) -> Floats:
    """F'F, float32 [k, k], in the same bits on every processor."""
    found = np.zeros((factor.shape[1], factor.shape[1]), dtype=np.float32)
    for row in factor:
        found += row[:, None] * row
    return found
