"""What a curious aggregator makes of updates, what it guesses of likes, how often it is right.

An update's rows are gradients. For one user of vector u, a liked item's row is -s u with s > 0. Of
BPR any other's is +s u, and s is the triple's weight times a logistic function of how well it is
ranked by now; of least squares s is the weight times what is left of the user's error on the item,
and no other row is named. So the update is a matrix of rank 1 (but for rounding and item_l2), whose
factors give s with its sign, and u up to its length. With several users rows that only one of them
touched lie on that user's line through zero; where many rows lie on one line, that is a user, and
least squares divides the other rows among the users.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.wire.arrays.exchange import Update

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

# Of the cosine between rows that count as lying on one line.
_ON_A_LINE = 0.97
# Of a row's usual size: what is not just rounding.
_SOME = 0.04
_MANY_MORE = 1.2
_CLEARLY = 0.02
_POWER_STEPS = 30
# Of the longest row: what counts for lines; and of the largest part: what a row owes to a user.
_LARGE, _A_PART = 0.05, 0.1
_SEVERAL, _LOOKS = 2, 3
# How much of a line has to lie outside of the known ones.
_NEW = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """What one update shows.

    Attributes:
        rows: int64 [r], the items that it names.
        liking: float64 [r]; above 0 where the row looks liked by somebody, in units of the usual
            size of a liked row.
        score: float64 [items], how well the tastes that were found rank each item of the catalogue,
            liked or not.
    """

    rows: Rows
    liking: Floats
    score: Floats


def sight(update: Update, items: NDArray[np.float32], popularity: Floats, users: int) -> Sighting:
    """Take an update apart.

    Args:
        update: as the aggregator decoded it.
        items: the matrix [items, K] that the round began with.
        popularity: float64 [items], any measure of how often each item is liked. It may tell which
            of the two signs is the liked ones'.
        users: how many share the device; 1 for the rank-1 decomposition.
    """
    rows, columns, values = _gradient(update.tensors)
    lines = _first_direction(values)[None] if users == 1 else _lines(values, users)
    if users == 1:
        liking = values @ lines.T
    else:
        liking = np.linalg.lstsq(lines.T, values.T, rcond=None)[0].T
    sizes = np.array([_usual(column) for column in liking.T])
    known = popularity[rows] - popularity[rows].mean()
    signs = np.array([_sign(column, known) for column in (liking / sizes).T])
    liking, lines = liking * signs, lines * signs[:, None]
    # A liked row is a step against the user's vector.
    score = -(items[:, columns].astype(np.float64) @ lines.T) * sizes
    return Sighting(rows, (liking / sizes).max(axis=1), score.max(axis=1))


def _gradient(tensors: Mapping[str, NDArray[Any]]) -> tuple[Rows, Rows, Floats]:
    """Of either loss: rows, columns, and what it is there, [r, k]."""
    if "factor" not in tensors:
        return tensors["rows"], tensors["columns"], tensors["values"].astype(np.float64)
    values = tensors["pulls"].astype(np.float64) @ tensors["factor"]
    return tensors["rows"], np.arange(values.shape[1]), values


def _usual(liking: Floats) -> float:
    """The size of a row that was certainly liked or certainly not."""
    sizes = np.abs(liking)
    return float(np.median(sizes[sizes >= sizes.max() / 4])) or 1.0


def _sign(liking: Floats, popularity: Floats) -> float:
    """1 where the rows above 0 are the liked ones, -1 where those below are.

    Pseudo-items have the sign of liked ones: the side of many more rows is the liked one. Failing
    that, each triple is as large on either side, but others are drawn twice now and then, so that
    their cubes sum to more. Where nothing was drawn twice, the more popular side is the liked one.
    """
    above, below = np.count_nonzero(liking > _SOME), np.count_nonzero(liking < -_SOME)
    if max(above, below) > _MANY_MORE * min(above, below):
        return 1.0 if above > below else -1.0
    cubes = liking**3
    if abs(cubes.sum()) > _CLEARLY * np.abs(cubes).sum():
        return 1.0 if cubes.sum() < 0 else -1.0
    return 1.0 if popularity @ liking >= 0 else -1.0


def _first_direction(values: Floats) -> Floats:
    """The right singular vector of the largest singular value, [k], by power iteration.

    Updates are of rank 1 but for little: it settles in a few steps.
    """
    together = values.T @ values
    found = values[np.abs(values).sum(axis=1).argmax()]
    for _ in range(_POWER_STEPS):
        found = together @ found
        found = found / (np.linalg.norm(found) + 1e-300)
    return found


def _lines(values: Floats, most: int) -> Floats:
    """Unit vectors of users' lines, [at most ``most`` and k, k].

    Lines that most rows lie on come first. What those leave of the other rows is looked at again: a
    user whose every row somebody else touched too shows there.
    """
    found = np.empty((0, values.shape[1]))
    most = min(most, values.shape[1])
    left = values
    for _ in range(_LOOKS):
        found = np.concatenate([found, _new_lines(left, found, most - len(found))])
        if len(found) == 0 or len(found) == most:
            break
        left = values - values @ np.linalg.pinv(found) @ found
    # Many rows' parts together say more of a line than the few that lie on it alone.
    for _ in range(_LOOKS):
        parts = values @ np.linalg.pinv(found)
        parts[np.abs(parts) < _A_PART * np.abs(parts).max(axis=0)] = 0
        refined = np.linalg.pinv(parts) @ values
        lengths = np.linalg.norm(refined, axis=1, keepdims=True)
        found = np.where(lengths > 0, refined / np.maximum(lengths, 1e-300), found)
    return found


def _new_lines(values: Floats, known: Floats, most: int) -> Floats:
    """Up to ``most`` lines that several rows lie on, none of them among sums of ``known`` ones."""
    sizes = np.linalg.norm(values, axis=1)
    rows = values[sizes > _LARGE * sizes.max()]
    rows = rows / np.linalg.norm(rows, axis=1)[:, None]
    narrow = rows.astype(np.float32)
    together = np.abs(narrow @ narrow.T) > _ON_A_LINE
    company = together.sum(axis=1)
    count = len(known)
    while len(known) < count + most:
        members = np.flatnonzero(together[company.argmax()])
        if company.max() < _SEVERAL:
            break
        line = _first_direction(rows[members])
        company -= together[:, members].sum(axis=1)
        company[members] = 0
        together[:, members] = False
        # Two users' rows of equal sizes lie on a line as well.
        own = line - line @ np.linalg.pinv(known) @ known if len(known) else line
        if np.linalg.norm(own) > _NEW:
            known = np.concatenate([known, line[None]])
    return known[count:]


class CuriousMethod(ScatterMethod):
    """Scatter aggregation as it is, which takes down what it sees of some devices.

    Args:
        items: the first matrix, float32 [items, K].
        settings: of the task.
        watched: names of the devices to look at.
        popularity: float64 [items]; see ``sight``.
        users: how many share a device.
        rng: rounds what is looked at to int8, as it travels unless the task says otherwise.
    """

    def __init__(
        self,
        items: NDArray[np.float32],
        settings: ScatterSettings,
        watched: Collection[str],
        popularity: NDArray[np.float64],
        users: int,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(items, settings)
        self._popularity = popularity
        self._users = users
        self._rng = rng
        self.seen: dict[str, list[Sighting]] = {name: [] for name in watched}
        """What was seen of each watched device, oldest first."""

    def _absorb(self, updates: Sequence[Update]) -> None:
        """Take updates in, and a look at each."""
        super()._absorb(updates)
        for update in updates:
            seen = self.seen.get(update.sender)
            if seen is not None and len(update.tensors["rows"]):
                seen.append(self.look(update))

    def look(self, update: Update) -> Sighting:
        """What an update shows that is not taken in."""
        items, width = self.items.shape
        body = encode_scatter_update(update, width, "int8", self._rng)
        arrived = decode_scatter_update(body, update.round_id, items, width)
        return sight(arrived, self.items, self._popularity, self._users)


_STEPS = 25
_SETTLED = 1e-3
_RIDGE = 1e-4
_FAR = 5.0


def liked_by_size(sighting: Sighting, weight: float) -> Rows:
    """The rows of one update that look liked and are too large for a pseudo-item's.

    Nothing is learnt: liked rows of a new user are all of one size, pseudo-items' ``weight`` times
    that, and the cut is half way between, on a logarithmic scale. Where pseudo-items weigh as much,
    every row that looks liked is taken.
    """
    cut = np.sqrt(weight) if weight < 1 else 0.0
    return sighting.rows[sighting.liking > cut]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What a device's updates say about each row that they name: ``features`` [r, f]."""

    rows: Rows
    features: Floats


def evidence(seen: Sequence[Sighting], popularity: Floats) -> Evidence:
    """Put one device's updates together, however many.

    ``popularity``: float64 [items], that of each item among *other* devices.
    """
    items, count = len(popularity), len(seen)
    liking = np.zeros((count, items))
    named = np.zeros((count, items), dtype=np.bool_)
    score = np.zeros(items)
    for place, one in enumerate(seen):
        liking[place, one.rows] = one.liking
        named[place, one.rows] = True
        score += one.score
    rows = np.flatnonzero(named.any(axis=0))
    liking, named = liking[:, rows], named[:, rows]
    times = named.sum(axis=0)
    mean = liking.sum(axis=0) / times
    least = np.where(named, liking, np.inf).min(axis=0)
    features = [
        np.clip(mean, -2, 2),
        np.log(np.maximum(np.abs(mean), 1e-3)),
        np.log1p(popularity[rows]),
        _standard(score[rows]),
    ]
    if count > 1:
        features += [np.clip(least, -2, 2), times / count, np.clip(liking[-1], -2, 2)]
    return Evidence(rows, np.stack(features, axis=1))


class LikesModel:
    """Logistic regression on the evidence, its squares and its products.

    It is trained on devices whose likes are known: an aggregator may run some of its own, or
    simulate a fleet on public data.
    """

    def __init__(self, known: Sequence[tuple[Evidence, NDArray[np.bool_]]]) -> None:
        """``known``: for each device its evidence, and for each of its rows whether it is liked."""
        raw = np.concatenate([one.features for one, _ in known])
        self._middle, self._width = raw.mean(axis=0), raw.std(axis=0) + 1e-9
        features = self._expanded(raw)
        liked = np.concatenate([truth for _, truth in known]).astype(np.float64)
        self._weights = np.zeros(features.shape[1])
        ridge = _RIDGE * len(features)

        def loss(weights: Floats) -> float:
            logits = features @ weights
            fit = np.logaddexp(0, logits) - liked * logits
            return float(fit.sum() + ridge / 2 * weights @ weights)

        for _ in range(_STEPS):
            chance = _logistic(features @ self._weights)
            curvature = features.T @ (features * (chance * (1 - chance))[:, None])
            slope = features.T @ (liked - chance) - ridge * self._weights
            step = np.linalg.solve(curvature + ridge * np.eye(len(slope)), slope)
            # Newton's step overshoots where some chances are near 0 or 1.
            while loss(self._weights + step) > loss(self._weights) and np.abs(step).max() > 1e-6:
                step /= 2
            self._weights += step
            if np.abs(step).max() < _SETTLED:
                break

    def chances(self, found: Evidence) -> Floats:
        """For each row, how likely it is that it is liked, [r]."""
        return _logistic(self._expanded(found.features) @ self._weights)

    def _expanded(self, raw: Floats) -> Floats:
        scaled = np.clip((raw - self._middle) / self._width, -_FAR, _FAR)
        first, second = np.triu_indices(scaled.shape[1])
        products = scaled[:, first] * scaled[:, second]
        return np.concatenate([np.ones((len(scaled), 1)), scaled, products], axis=1)


def _logistic(values: Floats) -> Floats:
    clipped: Floats = np.clip(values, -30, 30)
    return np.asarray(1 / (1 + np.exp(-clipped)), dtype=np.float64)


def _standard(values: Floats) -> Floats:
    return (values - values.mean()) / (values.std() + 1e-12)


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    """A device: what it sent, oldest first, what its users like, and its pseudo-items."""

    seen: Sequence[Sighting]
    likes: Rows
    pseudo: Rows


@dataclass(frozen=True, slots=True)
class Judgement:
    """Means over devices.

    Attributes:
        precision: share of the items said to be liked that are.
        recall: share of the liked items that were said.
        auc: how often a liked item ranks above a pseudo-item: 0.5 for an attack that cannot tell
            them apart, 1 for one that always can; None without pseudo-items, and for attacks that
            do not rank.
    """

    precision: float
    recall: float
    auc: float | None


def by_size(victims: Sequence[Victim], weight: float) -> Judgement:
    """Of the cut by size, on the last update of each."""
    found = [(*_hits(liked_by_size(one.seen[-1], weight), one.likes), math.nan) for one in victims]
    return _mean(found)


def by_learning(victims: Sequence[Victim], popularity: NDArray[np.float64]) -> Judgement:
    """Of the learned attack on all updates of each: trained on one half, judged on the other."""
    known = []
    for one in victims:
        # A device does not add to what is known from others.
        others = popularity.copy()
        others[one.likes] -= 1
        found = evidence(one.seen, np.maximum(others, 0))
        known.append((found, np.isin(found.rows, one.likes)))
    half = len(victims) // 2
    model = LikesModel(known[:half])
    judged = []
    for (found, truth), one in zip(known[half:], victims[half:], strict=True):
        chances = model.chances(found)
        is_pseudo = np.isin(found.rows, one.pseudo) & ~truth
        quality = ranking_quality(chances[truth], chances[is_pseudo])
        judged.append((*_hits(found.rows[chances > 0.5], one.likes), quality))
    return _mean(judged)


def ranking_quality(liked: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The area under the ROC curve: how often one of ``liked`` is above one of ``others``, ties
    counting half; NaN where either is empty."""
    if len(liked) == 0 or len(others) == 0:
        return math.nan
    ordered = np.sort(others)
    below = np.searchsorted(ordered, liked, side="left")
    up_to = np.searchsorted(ordered, liked, side="right")
    return float((below + up_to).mean() / (2 * len(others)))


def _hits(said: Rows, likes: Rows) -> tuple[float, float]:
    right = len(np.intersect1d(said, likes))
    return (right / len(said) if len(said) else math.nan, right / len(likes))


def _mean(found: Sequence[tuple[float, float, float]]) -> Judgement:
    means = [
        None if np.isnan(column).all() else float(np.nanmean(column))
        for column in np.array(found).T
    ]
    precision, recall, auc = means
    return Judgement(precision or 0.0, recall or 0.0, auc)
