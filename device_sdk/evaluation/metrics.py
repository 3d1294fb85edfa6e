"""Metrics whose statistics add up: a device measures, sums travel, and whoever adds them evaluates.

Every metric is a vector of float64 *statistics* that are zero for no data and add up over disjoint
data, and a function from such a vector to a figure. Whole counts come first, sums of real numbers
behind them. What one device claims is held to what any data could give (:meth:`Metric.check`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Floats = NDArray[Any]

CUTOFF = 10
NEGATIVES = 99


def sampled_rank(user: Floats, items: Floats, target: int, others: Rows) -> int:
    """Rank from 0 (best) of item ``target`` among ``others`` for the vector ``user``.

    ``user`` float [K], ``items`` float [items, K], ``others`` rows without ``target``. Ties count
    against the target, so that a constant score finds nothing. Scores must be finite: NaN would
    compare as a hit.
    """
    scores = _scores(items[np.append(others, target)], user)
    return int(np.count_nonzero(scores[:-1] >= scores[-1]))


def full_rank(user: Floats, items: Floats, target: int, seen: Rows) -> int:
    """As :func:`sampled_rank`, among all items outside ``seen``, the user's training items."""
    scores = _scores(items, user)
    wanted = scores[target]
    scores[seen] = -np.inf
    scores[target] = -np.inf
    return int(np.count_nonzero(scores >= wanted))


def _scores(items: Floats, user: Floats) -> Floats:
    """Each row by itself: a matrix product rounds by place, and equal rows would not tie."""
    scores: Floats = np.einsum("ik,k->i", items, user)
    return scores


def gains(ranks: Rows, cutoff: int = CUTOFF) -> NDArray[np.float64]:
    """What each rank adds to NDCG: 1 / log2(rank + 2) in the first ``cutoff``, else 0.

    With one relevant item the ideal is 1. A rank is a hit where its gain is above 0.
    """
    return np.where(ranks < cutoff, 1 / np.log2(ranks + 2.0), 0.0)


def draw_negatives(items: int, touched: Rows, rng: np.random.Generator) -> Rows:
    """99 distinct item rows outside ``touched``, or all of them where there are fewer.

    ``touched``: the user's training items and the held-out one.
    """
    outside = np.ones(items, dtype=np.bool_)
    outside[touched] = False
    found = np.flatnonzero(outside)
    return found if len(found) <= NEGATIVES else rng.choice(found, size=NEGATIVES, replace=False)


Statistics = NDArray[np.float64]
Array = NDArray[Any]
Scale = Literal["logits", "probabilities"]
"""What a classifier's output is: any real numbers (softmax or sigmoid of them are probabilities),
or probabilities themselves."""
SCALES: tuple[Scale, ...] = ("logits", "probabilities")

LARGEST_MEAN = 1e12
"""No mean of a loss, or of an error in size, is believed above this; of squared errors its
square."""
# Rounding of sums: a bin's sum of float64 may lie so far outside of its bounds, relatively.
_ROUNDING = 1e-9


class NotFinite(ValueError):
    """A loss or an output is not finite: the model is beyond measuring."""


class Metric(ABC):
    """One metric: the form of its statistics, and what they say.

    Attributes:
        name: in task files, artifacts and messages.
        title: for people.
        higher_is_better: what `best` and early stopping go by.
        weighs: what its weight counts.
        most_value: no data has a larger figure; infinite: its statistics end with a sum over
            samples of what has no largest value.
        counts: so many statistics come first that are whole numbers.
        sums: so many sums of real numbers follow.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    weighs: ClassVar[Literal["samples", "users"]] = "samples"
    most_value: ClassVar[float] = 1.0
    counts: ClassVar[int] = 1
    sums: ClassVar[int] = 1

    @property
    def size(self) -> int:
        """Length of the statistics."""
        return self.counts + self.sums

    def weight(self, statistics: Statistics) -> float:
        """Samples, or users, that the statistics are of. Here: the first one."""
        return float(statistics[0])

    def value(self, statistics: Statistics) -> float:
        """The figure; NaN where the statistics are of no data, or do not define it."""
        return self._value(statistics) if self.weight(statistics) > 0 else math.nan

    def error_bound(self, statistics: Statistics) -> float:
        """How far :meth:`value` may lie from the figure of the data itself. Here: 0."""
        return 0.0

    def check(self, statistics: Statistics) -> None:
        """Raises ValueError for statistics [size] that no data has: what a liar may send."""
        if statistics.dtype != np.float64 or statistics.shape != (self.size,):
            raise ValueError(
                f"{self.name} has {self.size} statistics, float64; found {statistics.dtype} "
                f"{list(statistics.shape)}"
            )
        if not np.isfinite(statistics).all():
            raise ValueError(f"{self.name}: statistics must be finite")
        if (statistics[: self.counts] < 0).any() or self.weight(statistics) <= 0:
            raise ValueError(f"{self.name}: counts must not be below 0, nor all be 0")
        if not self._possible(statistics):
            raise ValueError(f"{self.name}: no data has these statistics")

    @abstractmethod
    def _value(self, statistics: Statistics) -> float:
        """The figure of statistics of some weight."""

    @abstractmethod
    def _possible(self, statistics: Statistics) -> bool:
        """Whether sums agree with the counts, which are not negative."""


# What a trained graph gives: one loss for each batch.


class Loss(Metric):
    """Mean of the artifact's loss in evaluation mode, each batch weighed by its samples.

    It is the mean over samples where the loss is one over its batch. Statistics: samples, sum.
    """

    name = "loss"
    most_value = math.inf
    title = "loss"
    higher_is_better = False

    def measure(self, loss: float, samples: int) -> Statistics:
        """Of one batch with this loss. Raises ValueError where it is not finite."""
        if not math.isfinite(loss):
            raise NotFinite("the loss is not finite")
        return np.array([samples, loss * samples], dtype=np.float64)

    def _value(self, statistics: Statistics) -> float:
        return float(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        return bool(abs(statistics[1]) <= LARGEST_MEAN * statistics[0])


# What a graph's output is worth beside what was right: rows of samples.


class PredictionMetric(Metric):
    """A metric of predictions and what was right, a row for each sample."""

    classifies: ClassVar[bool] = True
    """Of classes; else of numbers."""
    binary: ClassVar[bool] = False
    """Of two classes only."""

    @abstractmethod
    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        """Statistics of a batch.

        Args:
            output: of a classifier float [n, classes], or [n] or [n, 1] for two classes, of which
                it is about the second; of numbers float [n, ...].
            target: the class of each sample, integers or floats [n] or [n, 1]; or numbers of the
                output's shape.
            scale: of a classifier's output.

        Raises ValueError, saying what was wrong, for shapes that do not fit, labels that are no
        class, and outputs that are not finite or no probabilities where they should be.
        """


class Accuracy(PredictionMetric):
    """Share of samples whose class is the likeliest one. Statistics: samples, right ones."""

    name = "accuracy"
    title = "accuracy"
    counts = 2
    sums = 0

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        likely, labels = classes(output, target, scale)
        found = likely > 0.5 if likely.ndim == 1 else np.argmax(likely, axis=1)
        return np.array([len(labels), np.count_nonzero(found == labels)], dtype=np.float64)

    def _value(self, statistics: Statistics) -> float:
        return float(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        return bool(statistics[1] <= statistics[0])


class LogLoss(PredictionMetric):
    """Mean cross-entropy in nats, each probability held above ``LEAST``. Statistics: samples, sum.

    Unlike the loss, it is the same figure whatever the model was trained with.
    """

    name = "log_loss"
    title = "log loss"
    higher_is_better = False
    LEAST: ClassVar[float] = 1e-7
    most_value = -math.log(LEAST)

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        likely, labels = classes(output, target, scale)
        if likely.ndim == 1:
            right = np.where(labels == 1, likely, 1 - likely)
        else:
            right = likely[np.arange(len(labels)), labels]
        return np.array([len(labels), -np.log(np.clip(right, self.LEAST, 1)).sum() + 0.0])

    def _value(self, statistics: Statistics) -> float:
        return float(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        most = -math.log(self.LEAST) * statistics[0] * (1 + _ROUNDING)
        return bool(0 <= statistics[1] <= most)


class Calibration(PredictionMetric):
    """Expected calibration error over 15 equal bins of confidence (Guo et al. 2017, eq. 3).

    Confidence is the likeliest class's probability, with two classes and one output the second
    one's. Statistics: by bin the samples and the right ones, then the sums of confidence.
    """

    name = "calibration"
    title = "calibration error"
    higher_is_better = False
    BINS: ClassVar[int] = 15
    counts = 2 * BINS
    sums = BINS

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        likely, labels = classes(output, target, scale)
        if likely.ndim == 1:
            sure, right = likely, labels == 1
        else:
            best = np.argmax(likely, axis=1)
            sure, right = likely[np.arange(len(best)), best], best == labels
        place = np.minimum((sure * self.BINS).astype(np.int64), self.BINS - 1)
        parts = [np.bincount(place, each, self.BINS) for each in (np.ones(len(sure)), right, sure)]
        return np.concatenate(parts)

    def weight(self, statistics: Statistics) -> float:
        return float(statistics[: self.BINS].sum())

    def _value(self, statistics: Statistics) -> float:
        samples, right, sure = statistics.reshape(3, self.BINS)
        return float(np.abs(sure - right).sum() / samples.sum())

    def _possible(self, statistics: Statistics) -> bool:
        samples, right, sure = statistics.reshape(3, self.BINS)
        low = np.arange(self.BINS) / self.BINS * samples
        high = (np.arange(self.BINS) + 1) / self.BINS * samples
        room = _ROUNDING * samples
        return bool(
            (right <= samples).all() and (sure >= low - room).all() and (sure <= high + room).all()
        )


class Auc(PredictionMetric):
    """Area under the ROC curve of two classes, from merged histograms of the scores.

    Statistics: by bin the samples of the first class, then those of the second. Scores in one bin
    count as tied, half a pair each, so the figure lies within half of the share of pairs that are
    tied (:meth:`error_bound`): sum over bins of n_b p_b / (2 N P). A score's bin is
    floor(256 * 2 / pi * asin(sqrt(probability))), which is finer where probabilities are near 0 and
    1, as rare clicks' are. NaN where one of the classes is missing.
    """

    name = "auc"
    title = "AUC"
    binary = True
    BINS: ClassVar[int] = 256
    counts = 2 * BINS
    sums = 0

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        likely, labels = classes(output, target, scale)
        if likely.ndim > 1:
            if likely.shape[1] != 2:
                raise ValueError(f"auc is of two classes, the output has {likely.shape[1]}")
            likely = likely[:, 1]
        places = self.BINS * 2 / math.pi * np.arcsin(np.sqrt(likely))
        place = np.minimum(places.astype(np.int64), self.BINS - 1)
        whole = np.bincount(place + self.BINS * labels, minlength=2 * self.BINS)
        return whole.astype(np.float64)

    def weight(self, statistics: Statistics) -> float:
        return float(statistics.sum())

    def error_bound(self, statistics: Statistics) -> float:
        """Half of the share of pairs that lie in one bin; NaN where the figure is."""
        first, second = statistics.reshape(2, self.BINS)
        pairs = first.sum() * second.sum()
        return float(first @ second / (2 * pairs)) if pairs > 0 else math.nan

    def _value(self, statistics: Statistics) -> float:
        first, second = statistics.reshape(2, self.BINS)
        pairs = first.sum() * second.sum()
        below = np.cumsum(first) - first
        return float(second @ (below + first / 2) / pairs) if pairs > 0 else math.nan

    def _possible(self, statistics: Statistics) -> bool:
        return True


class MeanAbsoluteError(PredictionMetric):
    """Mean of |output - target|, over a sample's elements first. Statistics: samples, sum."""

    name = "mae"
    most_value = math.inf
    title = "mean absolute error"
    higher_is_better = False
    classifies = False

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        errors = np.abs(_errors(output, target))
        return np.array([len(errors), errors.mean(axis=1).sum()], dtype=np.float64)

    def _value(self, statistics: Statistics) -> float:
        return float(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        return bool(0 <= statistics[1] <= LARGEST_MEAN * statistics[0])


class RootMeanSquaredError(PredictionMetric):
    """Root of the mean of (output - target)^2, as :class:`MeanAbsoluteError` is. Statistics:
    samples, sum of squares."""

    name = "rmse"
    most_value = math.inf
    title = "root mean squared error"
    higher_is_better = False
    classifies = False

    def measure(self, output: Array, target: Array, scale: Scale = "logits") -> Statistics:
        errors = np.square(_errors(output, target))
        return np.array([len(errors), errors.mean(axis=1).sum()], dtype=np.float64)

    def _value(self, statistics: Statistics) -> float:
        return math.sqrt(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        return bool(0 <= statistics[1] <= LARGEST_MEAN**2 * statistics[0])


# Where users' held-out items rank.


class RankMetric(Metric):
    """A metric of each user's held-out item's rank (``ranks.py``): among 99 drawn items, or with
    ``among_all`` among all that the user has not touched."""

    weighs = "users"
    among_all: ClassVar[bool] = False

    @abstractmethod
    def measure(self, ranks: NDArray[np.int64]) -> Statistics:
        """Of these users' ranks, int64 [users], 0 for the best."""

    def _value(self, statistics: Statistics) -> float:
        return float(statistics[1] / statistics[0])

    def _possible(self, statistics: Statistics) -> bool:
        return bool(0 <= statistics[1] <= statistics[0])


class HitRatio(RankMetric):
    """HR@10: share of users whose item is among the first ten. Statistics: users, hits."""

    name = "hr10"
    title = "HR@10 of 99 drawn"
    counts = 2
    sums = 0

    def measure(self, ranks: NDArray[np.int64]) -> Statistics:
        return np.array([len(ranks), np.count_nonzero(gains(ranks))], dtype=np.float64)


class Ndcg(RankMetric):
    """NDCG@10 of one relevant item a user. Statistics: users, sum of gains."""

    name = "ndcg10"
    title = "NDCG@10 of 99 drawn"

    def measure(self, ranks: NDArray[np.int64]) -> Statistics:
        return np.array([len(ranks), gains(ranks).sum()], dtype=np.float64)


class HitRatioAmongAll(HitRatio):
    """:class:`HitRatio` among all items."""

    name = "hr10_all"
    title = "HR@10 of all"
    among_all = True


class NdcgAmongAll(Ndcg):
    """:class:`Ndcg` among all items."""

    name = "ndcg10_all"
    title = "NDCG@10 of all"
    among_all = True


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Loss(),
            Accuracy(),
            LogLoss(),
            Auc(),
            Calibration(),
            MeanAbsoluteError(),
            RootMeanSquaredError(),
            HitRatio(),
            Ndcg(),
            HitRatioAmongAll(),
            NdcgAmongAll(),
        )
    }
)
"""All of them, by name."""


def metric_of(name: str) -> Metric:
    """The metric of this name. Raises ValueError, naming those there are."""
    if name not in METRICS:
        raise ValueError(f"metric {name!r:.40} is unknown; known are {', '.join(METRICS)}")
    return METRICS[name]


# A batch's arrays as a metric takes them.


def classes(
    output: Array, target: Array, scale: Scale
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities [n, classes], or [n] of the second of two classes, and labels int64 [n].

    Raises ValueError as :meth:`PredictionMetric.measure` does.
    """
    scores = _finite(output)
    if scores.ndim == 2 and scores.shape[1] == 1:
        scores = scores[:, 0]
    if scores.ndim not in (1, 2):
        raise ValueError(
            f"the output has shape {list(output.shape)}; expected [n, classes], or [n] for two"
        )
    count = scores.shape[1] if scores.ndim == 2 else 2
    labels = target[:, 0] if target.ndim == 2 and target.shape[1] == 1 else target
    if labels.shape != scores.shape[:1]:
        raise ValueError(
            f"the target has shape {list(target.shape)}, the output {list(output.shape)}; expected "
            "a class for each sample"
        )
    with np.errstate(invalid="ignore"):  # NaN is no class either
        whole = labels.astype(np.int64)
    if (whole != labels).any() or ((whole < 0) | (whole >= count)).any():
        raise ValueError(f"a target is no class from 0 to {count - 1}")
    return _probabilities(scores, scale), whole


def _probabilities(scores: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    if scale == "probabilities":
        # Float32 softmax and sigmoid leave these bounds by rounding, and no further.
        if ((scores < -1e-4) | (scores > 1 + 1e-4)).any():
            raise ValueError("the output holds values outside 0 to 1, which are no probabilities")
        return np.clip(scores, 0, 1)
    if scores.ndim == 1:
        small = np.exp(-np.abs(scores))  # no overflow on either side
        return np.where(scores >= 0, 1 / (1 + small), small / (1 + small))
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return likely


def _errors(output: Array, target: Array) -> NDArray[np.float64]:
    """Differences [n, elements]."""
    if _squeezed(output.shape) != _squeezed(target.shape):
        raise ValueError(
            f"the target has shape {list(target.shape)}, the output {list(output.shape)}; expected "
            "the same"
        )
    count = len(output)
    errors = _finite(output).reshape(count, -1) - _finite(target, "the target").reshape(count, -1)
    # Held to what a reader believes.
    if (np.abs(errors) > LARGEST_MEAN).any():
        raise ValueError(f"an error is above {LARGEST_MEAN:g}")
    return errors


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape


def _finite(array: Array, what: str = "the output") -> NDArray[np.float64]:
    if array.ndim == 0 or len(array) == 0:
        raise ValueError(f"an array of shape {list(array.shape)} holds no samples")
    whole = array.astype(np.float64)
    if not np.isfinite(whole).all():
        raise NotFinite(f"{what} holds values that are not finite")
    return whole
