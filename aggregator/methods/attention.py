"""The aggregator's half of attention-based aggregation: it keeps, clusters and hands on models.

Method: FedAMN (papers/fedamn), section 3.1 and algorithm 1; FedAMP (Huang et al. 2021) and, without
any mixing, FedAvg are settings of it. docs/methods/attention.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans, MeanShift, estimate_bandwidth
from threadpoolctl import threadpool_limits

from aggregator.methods.bounds import UpdateBounds
from aggregator.methods.method import (
    LOSSES,
    Binding,
    ModelMethod,
    RateDecay,
    Refused,
    Said,
    rate_at,
    require_floats,
    require_within,
)
from aggregator.methods.robust import LastUpdates
from aggregator.methods.submodels import submodels_of, trained_of
from aggregator.methods.sums import CoveredMean
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import FlatLadder, FlatLayout
from device_sdk.fields import Declared, Within
from device_sdk.methods.attention.contract import (
    MIXTURE,
    VECTOR,
    AttentionTraining,
    ladder_to_text,
    sketches,
)
from device_sdk.methods.state import Entry, RestoreError, Schema
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.arrays.tensors import LARGEST_TO_HAND_ON, halved

# The devices' last models, and the mixtures of them that the aggregator makes by itself.


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModels:
    """The last models of n devices, in the order in which these were first heard of.

    ``senders``: names. ``vectors`` float32 [n, p]: of the full model, zero where a rung has
    nothing. ``widths``, ``samples`` int64 [n]: the place of the model's rung among the task's, and
    its training samples.
    ``asks`` bool [n]: the device leaves mixing to the aggregator.
    """

    senders: tuple[str, ...]
    vectors: NDArray[np.float32]
    widths: NDArray[np.int64]
    samples: NDArray[np.int64]
    asks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.senders)

    @property
    def sender_bytes(self) -> NDArray[np.uint8]:
        """The names as uint8 [n, 16]."""
        raw = bytes.fromhex("".join(self.senders))
        return np.frombuffer(raw, dtype=np.uint8).reshape(len(self), 16).copy()

    @classmethod
    def of(
        cls,
        updates: Iterable[Update],
        ladder: FlatLadder,
        places: Sequence[NDArray[np.int64]],
    ) -> DeviceModels:
        """What these say; ``places``: of each rung's numbers among the full model's."""
        each = list(updates)
        said = [update.metadata for update in each]
        widths = [width_among(ladder, update) for update in each]
        vectors = np.zeros((len(each), ladder.full.size), dtype=np.float32)
        for vector, width, update in zip(vectors, widths, each, strict=True):
            vector[places[width]] = update.tensors["vector"]
        return cls(
            tuple(update.sender for update in each),
            vectors,
            np.asarray(widths, dtype=np.int64),
            np.asarray([one["samples"] for one in said], dtype=np.int64),
            np.asarray([one["mixture"] for one in said], dtype=np.bool_),
        )


Numbers = NDArray[Any]
Rule = Literal["likeness", "sketches", "fedamp"]


@dataclass(frozen=True, slots=True)
class MixtureSettings(Declared):
    """How the aggregator mixes for a device that does not mix by itself.

    Attributes:
        rule: ``likeness`` adds to the global model what alike devices have in common, as far as
            they have (:func:`likeness_weights`): nothing to choose; ``sketches`` is the device's
            two layers with the identity in the place of what a device learns; ``fedamp`` is
            FedAMP's attention (Huang et al. 2021, Personalized cross-silo federated learning on
            non-IID data, eq. 5 and section 3.2).
        sharpness: ``sketches`` weighs by exp(-this / 2 * the sketches' mean squared distance).
        own_bias: ``sketches`` gives (the neighbours' mixture, w_g) the shares softmax([this, 0]).
        amp_rate: alpha / sigma of FedAMP, the weight of a neighbour at distance 0.
        amp_sigma: sigma of FedAMP, as a multiple of the mean squared distance between the
            cluster's devices (the scale of parameters means nothing by itself).

    Raises ValueError, naming the setting, for a value outside its range.
    """

    rule: Rule = "likeness"
    sharpness: Annotated[float, Within(0, 1e6, above=True)] = 4.0
    own_bias: Annotated[float, Within(-100, 100)] = 0.0
    amp_rate: Annotated[float, Within(0, 1e6, above=True)] = 0.5
    amp_sigma: Annotated[float, Within(0, 1e6, above=True)] = 0.5


@dataclass(frozen=True)
class AggregatorMixer:
    """Mixes for one device at a time, out of what the aggregator holds in a round.

    Args:
        models: the known devices'.
        places: of each rung's numbers among the full model's, smallest rung first.
        shared: w_g, float32 [p] of the full model.
        sketches: in units of their cluster's length, float32 [n, g, d].
        own_weight: see :class:`~device_sdk.methods.attention.contract.AttentionTraining`.
    """

    models: DeviceModels
    places: Sequence[NDArray[np.int64]]
    shared: Numbers
    sketches: Numbers
    settings: MixtureSettings
    own_weight: float = 0.0

    def mixture(self, row: int, cluster: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the device in ``row`` is to start from, float32 [p] in its own layout.

        With ``likeness`` w_g + sum of a_j (w_j - w_g).

        ``cluster``: the rows of its cluster, its own among them. Alone it gets the global model.
        """
        models = self.models
        places = self.places[models.widths[row]]
        peers = cluster[cluster != row]
        if len(peers) == 0:
            return np.asarray(self.shared[places], dtype=np.float32)
        vectors = np.stack([self._seen_by(row, int(peer)) for peer in peers])
        own = models.vectors[row][places]
        if self.settings.rule == "fedamp":
            weights = self._amp_weights(row, cluster)
            mixed = weights @ vectors + (1 - weights.sum()) * own
            return np.asarray(mixed, dtype=np.float32)
        if self.settings.rule == "likeness":
            shared = self.shared[places]
            weights = likeness_weights(self.sketches[row], self.sketches[peers])
            return np.asarray(shared + weights @ (vectors - shared), dtype=np.float32)
        weights = sketch_weights(
            self.sketches[row], self.sketches[peers], self.settings.sharpness, self.own_weight
        )
        heard = weights @ np.concatenate([vectors, own[None]])
        share = 1 / (1 + math.exp(-self.settings.own_bias))
        mixed = share * heard + (1 - share) * self.shared[places]
        return np.asarray(mixed, dtype=np.float32)

    def _amp_weights(self, row: int, cluster: NDArray[np.int64]) -> Numbers:
        """Distances are over the smallest rung's numbers, which all have."""
        common = self.models.vectors[cluster][:, self.places[0]].astype(np.float64)
        mine = self.models.vectors[row][self.places[0]]
        squared = ((common - mine) ** 2).sum(axis=1)[cluster != row]
        # Mean over all pairs: twice the variance, without the zeros of each with itself.
        spread = 2 * ((common - common.mean(axis=0)) ** 2).sum(axis=1).mean()
        scale = spread * len(cluster) / (len(cluster) - 1)
        return amp_weights(squared, self.settings, float(scale))

    def _seen_by(self, row: int, peer: int) -> Numbers:
        """A peer's model in the layout of the device in ``row``, whose own fills what it lacks."""
        models = self.models
        whole = models.vectors[row].copy()
        places = self.places[models.widths[peer]]
        whole[places] = models.vectors[peer][places]
        found: Numbers = whole[self.places[models.widths[row]]]
        return found


def likeness_weights(query: Numbers, sketches: Numbers) -> Numbers:
    """Weights of n neighbours' gaps w_j - w_g, [n], that sum to less than 1.

    ``query`` [g, d], ``sketches`` [n, g, d]. Two gaps' concordance is 2 s_i s_j / (|s_i|^2 +
    |s_j|^2): 1 where they are the same, 0 where one says nothing of the other. Likeness is its
    square, of those above 0: what sketches have in common by chance then counts for next to
    nothing, though there are many. Where m devices are as alike as r to each other, the weights are
    r / (1 + (m - 2) r), the form of the best linear prediction of what they have in common.
    """
    mine, theirs = query.reshape(-1), sketches.reshape(len(sketches), -1)
    lengths = (theirs**2).sum(axis=1) + (mine**2).sum()
    likes: Numbers = np.maximum(2 * (theirs @ mine) / np.maximum(lengths, 1e-12), 0) ** 2
    total = float(likes.sum())
    if total == 0:
        return likes
    return likes / (1 + total - float((likes**2).sum()) / total)


def sketch_weights(
    query: Numbers, sketches: Numbers, sharpness: float, own_weight: float = 0.0
) -> Numbers:
    """Weights of n neighbours and the own network, [n + 1], which sum to 1.

    ``query`` [g, d], ``sketches`` [n, g, d], n at least 1; ``own_weight`` in units of the favourite
    neighbour's. They are those with which a device's attention starts at this ``key_scale``.
    """
    scores = -sharpness / 2 * ((sketches - query) ** 2).sum(axis=2).mean(axis=1)
    weights = np.append(np.exp(scores - scores.max()), own_weight)
    shares: Numbers = weights / weights.sum()
    return shares


def amp_weights(squared: Numbers, settings: MixtureSettings, scale: float) -> Numbers:
    """FedAMP's weights xi of n neighbours at these squared distances, [n]; the own weight is what
    is left to 1.

    ``scale``: mean squared distance between the cluster's devices.
    """
    sigma = settings.amp_sigma * max(scale, 1e-12)
    weights = settings.amp_rate * np.exp(-squared / sigma)
    total = float(weights.sum())
    return weights / total if total > 1 else weights


Labels = NDArray[np.int64]
Points = NDArray[np.float64]
Algorithm = Literal["k-means", "mean-shift"]

# More clusters than this times the fewest possible: then members are spread evenly instead.
_MOST_TIMES = 2
# With scikit-learn's usual 0.3 a fleet of six groups would become one.
_NEAREST = 0.2


# Groups of devices with similar models, no larger than a device can download.


@dataclass(frozen=True, slots=True)
class ClusterSettings(Declared):
    """How devices are put into clusters (papers/fedamn, section 3.1, the server's function 2).

    Attributes:
        algorithm: ``k-means`` makes as few clusters as the byte cap allows, one where it can;
            ``mean-shift`` finds their number by itself and splits what exceeds the cap.
        most_bytes: of what one device may have to download a round; 0 for no cap.
        hysteresis: clusters stay as they are unless new ones would lower the squared distances to
            the centres by more than this share.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    algorithm: Algorithm = "k-means"
    most_bytes: Annotated[int, Within(0)] = 0
    hysteresis: Annotated[float, Within(0)] = 0.2


def assign_clusters(
    points: Points, previous: Labels, most_members: int, settings: ClusterSettings
) -> Labels:
    """A cluster for each point, int64 [n], numbered from 0 without gaps.

    Args:
        points: float64 [n, d].
        previous: last round's clusters, int64 [n], -1 for points that are new.
        most_members: no cluster is larger.
        settings: of the task.

    The same arguments give the same clusters. Numbers follow the previous ones where members do.
    Raises ValueError where ``most_members`` is below 1 or lengths differ.
    """
    if most_members < 1:
        raise ValueError(f"a cluster of at most {most_members} members cannot hold a device")
    if points.ndim != 2 or previous.shape != (len(points),):
        raise ValueError(f"{len(previous)} previous clusters for points {points.shape}")
    if len(points) == 0:
        return np.empty(0, dtype=np.int64)
    if settings.algorithm == "k-means" and len(points) <= most_members:
        return np.zeros(len(points), dtype=np.int64)
    stay = _stay(points, previous, most_members)
    # One thread: the order of sums, and so the last bits, depend on their number.
    with threadpool_limits(1):
        fresh = _fresh(points, stay, most_members, settings)
    if stay is not None and _spread(points, stay) <= (1 + settings.hysteresis) * _spread(
        points, fresh
    ):
        return _numbered(stay, previous)
    return _numbered(fresh, previous)


def _fresh(
    points: Points, stay: Labels | None, most_members: int, settings: ClusterSettings
) -> Labels:
    if settings.algorithm == "mean-shift":
        return _mean_shift(points, most_members)
    least = -(-len(points) // most_members)
    for count in range(least, min(_MOST_TIMES * least, len(points)) + 1):
        labels = _k_means(points, count, stay)
        if np.bincount(labels).max() <= most_members:
            return labels
    return _even(points, _centres(points, labels), most_members)


def _k_means(points: Points, count: int, stay: Labels | None) -> Labels:
    """From the previous centres where their number fits, else from many random starts."""
    count = min(count, len(np.unique(points, axis=0)))
    warm = stay is not None and stay.max() + 1 == count
    start = _centres(points, stay) if warm and stay is not None else "k-means++"
    found = KMeans(count, init=start, n_init=1 if warm else 10, random_state=0).fit(points)
    return _dense(found.labels_.astype(np.int64))


def _mean_shift(points: Points, most_members: int) -> Labels:
    # The nearest points tell how wide a group is, and a kernel of twice that holds a whole one.
    width = 2 * float(estimate_bandwidth(points, quantile=_NEAREST))
    if width <= 0:
        labels = np.zeros(len(points), dtype=np.int64)
    else:
        labels = _dense(MeanShift(bandwidth=width).fit(points).labels_.astype(np.int64))
    found = labels.copy()
    for label in range(labels.max() + 1):
        rows = np.flatnonzero(labels == label)
        if len(rows) > most_members:
            count = -(-len(rows) // most_members)
            parts = _k_means(points[rows], count, None)
            even = _even(points[rows], _centres(points[rows], parts), most_members)
            found[rows] = np.where(even == 0, label, found.max() + even)
    return _dense(found)


def _stay(points: Points, previous: Labels, most_members: int) -> Labels | None:
    """The previous clusters, new points with the nearest that has room; None where none is left."""
    known = previous >= 0
    if not known.any():
        return None
    labels = np.where(known, _renumbered(previous), -1)
    sizes = np.bincount(labels[known])
    if sizes.max() > most_members:
        return None
    centres = _centres(points[known], labels[known])
    for row in np.flatnonzero(~known):
        far = _squared(points[row][None], centres)[0]
        far[sizes >= most_members] = np.inf
        if not np.isfinite(far).any():
            return None
        labels[row] = int(far.argmin())
        sizes[labels[row]] += 1
    return labels


def _even(points: Points, centres: Points, most_members: int) -> Labels:
    """The assignment to centres of least cost under which none has too many members."""
    # Of identical points k-means makes fewer centres than it was asked for.
    centres = np.resize(
        centres, (max(len(centres), -(-len(points) // most_members)), centres.shape[1])
    )
    cost = np.repeat(_squared(points, centres), most_members, axis=1)
    rows, slots = linear_sum_assignment(cost)
    labels = np.empty(len(points), dtype=np.int64)
    labels[rows] = slots // most_members
    return _dense(labels)


def _numbered(labels: Labels, previous: Labels) -> Labels:
    """Numbers so that as many members as possible keep their cluster's number."""
    known = previous >= 0
    if not known.any():
        return labels
    before = _renumbered(previous)
    size = int(max(labels.max(), before[known].max())) + 1
    shared = np.zeros((size, size))
    np.add.at(shared, (labels[known], before[known]), 1)
    new, old = linear_sum_assignment(-shared)
    number = np.empty(size, dtype=np.int64)
    number[new] = old
    return _dense(number[labels])


def _renumbered(previous: Labels) -> Labels:
    """Without gaps; -1 stays."""
    found = np.full(len(previous), -1, dtype=np.int64)
    known = previous >= 0
    found[known] = _dense(previous[known])
    return found


def _dense(labels: Labels) -> Labels:
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _centres(points: Points, labels: Labels) -> Points:
    return np.stack([points[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def _squared(points: Points, centres: Points) -> Points:
    gaps = points[:, None, :] - centres[None]
    found: Points = (gaps * gaps).sum(axis=2)
    return found


def _spread(points: Points, labels: Labels) -> float:
    return float(((points - _centres(points, labels)[labels]) ** 2).sum())


# What a task file may choose about attention.


@dataclass(frozen=True, slots=True)
class AttentionSettings(Declared):
    """Settings of an attention task.

    Attributes:
        training: what the broadcast tells the devices.
        clusters: how devices are grouped.
        mixture: how the aggregator mixes for devices that do not.
        keep_rounds: a device's last model takes part for so many rounds after it came.
        most_samples: a device that claims more samples weighs as much as one with so many; 0 for no
            limit.
        half: vectors and mixtures are handed on as float16, where that holds them.
        rate_decay: the devices' learning rate falls by this factor a round; personal models are
            used as they are after the last steps, which should be quiet ones.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    training: AttentionTraining = field(default_factory=AttentionTraining)
    clusters: ClusterSettings = field(default_factory=ClusterSettings)
    mixture: MixtureSettings = field(default_factory=MixtureSettings)
    keep_rounds: Annotated[int, Within(1)] = 10
    most_samples: Annotated[int, Within(0)] = 0
    half: bool = True
    rate_decay: RateDecay = 1.0

    def check(self) -> None:
        if self.mixture.rule == "fedamp" and not self.training.aggregator_mixes:
            raise ValueError("the rule 'fedamp' needs training with aggregator_mixes=True")


# The parts of an attention update.

_SAMPLE_COUNTS = Within(1, 1 << 40)


def check_parts(update: Update, ladder: FlatLadder) -> None:
    """Raises Refused with reason ``bad-tensors``, ``bad-metadata`` or ``bad-values``."""
    if set(update.tensors) != {"vector"}:
        raise Refused("bad-tensors", "expected exactly the tensor vector")
    _check_metadata(update, ladder)
    shape = (ladder.layouts[width_among(ladder, update)].size,)
    require_floats("vector", update.tensors["vector"], shape)
    require_within(update.tensors["vector"], LARGEST_TO_HAND_ON)


def width_among(ladder: FlatLadder, update: Update) -> int:
    """The place of a sound update's rung among the task's, from 0."""
    return ladder.rungs.index(int(update.metadata["rung"])) if ladder.rungs else 0


def _check_metadata(update: Update, ladder: FlatLadder) -> None:
    said = Said(update.metadata)
    said.integer("samples", _SAMPLE_COUNTS)
    said.boolean("mixture")
    said.number("loss", LOSSES)
    if ladder.rungs and said.integer("rung") not in ladder.rungs:
        raise Refused("bad-metadata", "rung is none of the task's")
    said.end()


# Sketches of the devices' models: what tells, before any vector is fetched, who is like whom.

Floats = NDArray[np.float32]
_TINY = np.float32(1e-12)
# What every codec carries: only sketches of absurd models are longer.
_LARGEST = np.float32(LARGEST_TO_HAND_ON)


def gap_sketches(
    vectors: Floats,
    shared: Floats,
    places: NDArray[Any],
    layout: FlatLayout,
    training: AttentionTraining,
) -> Floats:
    """P (w_j - w_g), float32 [n, g, d], over the smallest rung's numbers, which all have.

    ``vectors`` [n, p] and ``shared`` [p] of the full model; ``layout`` is the smallest rung's, and
    ``places`` its numbers' places among the p.
    """
    gaps = vectors[:, places] - shared[places]
    return sketches(gaps, layout, training.sketch_seed, training.sketch_rows)


def in_cluster_units(raw: Floats, clusters: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The sketches [n, g, d] in units of their cluster's RMS length, and that length [clusters, g].

    ``clusters``: of each of the n, from 0 without gaps.
    """
    count = int(clusters.max()) + 1 if len(clusters) else 0
    scales = np.ones((count, raw.shape[1]), dtype=np.float32)
    for cluster in range(count):
        squared = (raw[clusters == cluster] ** 2).sum(axis=2)
        scales[cluster] = np.minimum(np.sqrt(squared.mean(axis=0)), _LARGEST)
    scaled = raw / np.maximum(scales, _TINY)[clusters][:, :, None]
    return np.clip(scaled, -_LARGEST, _LARGEST).astype(np.float32), scales


def cluster_points(raw: Floats) -> NDArray[np.float64]:
    """Points to cluster by, [n, g * d]: each group counts the same, whatever its size."""
    wide = raw.astype(np.float64)
    lengths = np.sqrt((wide**2).sum(axis=2).mean(axis=0))
    points: NDArray[np.float64] = wide / np.maximum(lengths, 1e-12)[None, :, None]
    return points.reshape(len(wide), -1)


# What an attention round attaches: vectors for each cluster, mixtures for single devices.


def attachments_of(
    mixer: AggregatorMixer, clusters: NDArray[np.int64], settings: AttentionSettings
) -> tuple[dict[str, Attachment], dict[str, tuple[str, ...]]]:
    """The attachments by name, and the cohorts that may read them, as their members' names.

    ``vector.SENDER``: for the cluster, of each device in one where somebody mixes by itself, but
    none where layer 2 alone takes part, which needs no neighbour.
    ``mixture.SENDER``: for that device alone, of each that leaves mixing to the aggregator.

    ``clusters``: the mixer's n devices', int64 [n].
    """
    training, models = settings.training, mixer.models
    handed_on = halved if settings.half else np.asarray
    attachments: dict[str, Attachment] = {}
    cohorts: dict[str, tuple[str, ...]] = {}
    for cluster in range(int(clusters.max()) + 1 if len(models) else 0):
        rows = np.flatnonzero(clusters == cluster)
        cohorts[f"cluster.{cluster}"] = tuple(models.senders[row] for row in rows)
        fetchers = [r for r in rows if not (training.aggregator_mixes or models.asks[r])]
        for row in rows if fetchers and training.layers != "second" else ():
            vector = models.vectors[row][mixer.places[models.widths[row]]]
            attachments[VECTOR + models.senders[row]] = Attachment(
                {"vector": handed_on(vector)}, f"cluster.{cluster}"
            )
        for row in sorted(set(rows) - set(fetchers)):
            name = models.senders[row]
            cohorts[f"device.{name}"] = (name,)
            attachments[MIXTURE + name] = Attachment(
                {"mixture": handed_on(mixer.mixture(int(row), rows))}, f"device.{name}"
            )
    return attachments, cohorts


class AttentionMethod(ModelMethod):
    """Keeps each device's last model, and the global one, the mean of a round's, which is the
    version: what devices made of it for themselves is theirs.

    Args:
        initial: the global model to start from, float32 [p] of the full model.
        ladder: of the model; each rung lies within the next.
        settings: of the task.

    Memory is that of one vector for each device heard of in the last ``keep_rounds`` rounds: whom
    a device will listen to is not known when another's update arrives. Raises ValueError where the
    rungs do not nest, ``initial`` does not fit, or not even one neighbour fits the byte cap.
    """

    PARTS = ("last",)
    keeps = True
    _training: AttentionTraining
    # A rung is no amount.
    bounds = UpdateBounds(exact=("rung",))

    def __init__(
        self,
        initial: Floats,
        ladder: FlatLadder,
        settings: AttentionSettings | None = None,
    ) -> None:
        self._ladder = ladder
        self._settings = settings if settings is not None else AttentionSettings()
        for inner, outer in pairwise(ladder.layouts):
            ladder.places(inner, outer)
        self._places = tuple(map(ladder.places, ladder.layouts))
        super().__init__(initial, ladder.full, self._settings.training)
        if self._settings.rate_decay < 1 and self._training.learning_rate == 0:
            raise ValueError("rate_decay needs a learning_rate: the artifact has none that falls")
        if self._most_members(0) < 2:
            raise ValueError(
                f"most_bytes is {self._settings.clusters.most_bytes}, too little for the global "
                f"model and one neighbour's ({self._vector_bytes * 2} and more)"
            )

    def reset(self) -> None:
        """Forget the devices' models: how far they are from another one says nothing."""
        self._last, self._came = LastUpdates(), LastUpdates()
        self._losses: list[float] = []
        self._clusters = np.empty(0, dtype=np.int64)

    @property
    def shared(self) -> Floats:
        """w_g, float32 [p] of the full model: a copy."""
        return self.model

    @property
    def clusters(self) -> dict[str, int]:
        """Each known device's cluster."""
        return {one.sender: int(at) for one, at in zip(self._last, self._clusters, strict=True)}

    def tell(self) -> Broadcast:
        """The broadcast holds ``global`` [p], and for the n known devices ``senders`` uint8
        [n, 16], ``sketches`` [n, g, d], ``widths`` uint8 [n], ``clusters`` int32 [n] and ``scales``
        [clusters, g]: of none where the aggregator mixes for all, who then need not know.

        After the warm-up each device's vector is attached for its cluster's cohort, and a mixture
        for each device that does not mix by itself, for that device alone.
        """
        round_id, models = self._round_id, self._models
        rate = rate_at(self._training.learning_rate, self._settings.rate_decay, round_id)
        training = replace(self._training, learning_rate=rate)
        sketched, scales = in_cluster_units(self._sketches(models), self._clusters)
        attachments: dict[str, Attachment] = {}
        cohorts: dict[str, tuple[str, ...]] = {}
        if training.mix and round_id > training.warm_up_rounds:
            chosen, seen = self._settings, (models, self._places, self._model, sketched)
            mixer = AggregatorMixer(*seen, chosen.mixture, training.own_weight)
            attachments, cohorts = attachments_of(mixer, self._clusters, chosen)
        told = len(models) if training.mix and not training.aggregator_mixes else 0
        return Broadcast(
            round_id=round_id,
            version=self._version,
            tensors={
                "global": self.model,
                "senders": models.sender_bytes[:told],
                "sketches": sketched[:told],
                "widths": models.widths.astype(np.uint8)[:told],
                "clusters": self._clusters.astype(np.int32)[:told],
                "scales": scales[:told],
            },
            settings={**training.as_scalars(), "ladder": ladder_to_text(self._ladder)},
            attachments=attachments,
            cohorts=cohorts,
        )

    def require(self, update: Update) -> None:
        """Refuses with reason ``no-sender``, ``repeated``, ``bad-tensors``, ``bad-metadata`` or
        ``bad-values``."""
        if not update.sender:
            raise Refused("no-sender", "attention must know whose model it is")
        if self._held.has(update.sender, update.round_id):
            raise Refused("repeated", "this device's model of the round is here already")
        check_parts(update, self._ladder)

    def expected(self, update: Update) -> dict[str, Floats]:
        """The global model, in the layout of the device's own: w_j - w_g is what is bounded."""
        return {"vector": self._model[self._places[width_among(self._ladder, update)]]}

    def add(self, update: Update) -> None:
        """Keeps the model. It takes the place of one of the same device that was carried over from
        a round without quorum."""
        self._came.put(update)
        self._losses.append(float(update.metadata["loss"]))

    def step(self) -> Mapping[str, float]:
        """Figures: mean ``loss``, ``known`` devices, ``clusters``, the ``largest``, and how many
        known devices ``moved`` to another."""
        came, losses = self._came, self._losses
        self._came, self._losses = LastUpdates(), []
        self._participants = len(came)  # of whom some may have been carried over, and come again
        global_before, before = self._model, self.clusters
        self._model = self._average(self._models_of(came))
        global_step = self._model - global_before
        for update in came:
            self._last.put(update)
        for update in list(self._last):
            if update.round_id <= self._round_id - self._settings.keep_rounds:
                self._last.drop(update.sender)
            elif update.sender not in came:
                self._last.put(self._moved_along(update, global_step))
        previous = [before.get(update.sender, -1) for update in self._last]
        self._clusters = self._cluster(np.asarray(previous, dtype=np.int64))
        sizes = np.bincount(self._clusters)
        moved = sum(old not in (-1, new) for old, new in zip(previous, self._clusters, strict=True))
        return {
            "loss": sum(losses) / len(losses),
            "known": float(len(self._last)),
            "clusters": float(len(sizes)),
            "largest": float(sizes.max()),
            "moved": float(moved),
        }

    def forget(self, sender: str) -> None:
        if sender not in self._last:
            return
        kept = np.asarray([update.sender != sender for update in self._last])
        self._last.drop(sender)
        # Clusters are numbered without gaps.
        self._clusters = np.unique(self._clusters[kept], return_inverse=True)[1].astype(np.int64)

    def schema(self) -> Schema:
        return {**super().schema(), "clusters": Entry(np.int64, ("devices",), least=0)}

    def _require_sound(self) -> None:
        if len(self._clusters) != len(self._last):
            raise RestoreError(f"'clusters' are expected to be those of {len(self._last)} models")
        for update in (*self._last, *self._held):
            try:
                check_parts(update, self._ladder)
            except Refused as error:
                raise RestoreError(f"a kept model is of another task: {error}") from None

    # -- inside ------------------------------------------------------------------------------------

    def _moved_along(self, update: Update, step: Floats) -> Update:
        """The model of a device that stayed away, as far from the new global model as it was from
        the last: what is its own. Else all who stayed away would have their age in common."""
        vector = update.tensors["vector"] + step[self._places[width_among(self._ladder, update)]]
        bounded = np.clip(vector, -LARGEST_TO_HAND_ON, LARGEST_TO_HAND_ON)
        return replace(update, tensors={"vector": bounded.astype(np.float32)})

    @property
    def _vector_bytes(self) -> int:
        return self._layout.size * (2 if self._settings.half else 4)

    @property
    def _models(self) -> DeviceModels:
        return self._models_of(self._last)

    def _models_of(self, updates: Iterable[Update]) -> DeviceModels:
        return DeviceModels.of(updates, self._ladder, self._places)

    def _average(self, came: DeviceModels) -> Floats:
        """FedAvg over the devices whose models have the number; what none has stays."""
        most = self._settings.most_samples
        counts = np.minimum(came.samples, most) if most else came.samples
        mean = CoveredMean(self._model.shape)
        for vector, width, samples in zip(came.vectors, came.widths, counts, strict=True):
            mean.add(self._places[width], vector[self._places[width]], samples)
        return np.where(mean.known, mean.value, self._model).astype(np.float32)

    def _most_members(self, known: int) -> int:
        """How many devices may be in a cluster under the byte cap; all without one."""
        cap = self._settings.clusters.most_bytes
        if cap == 0:
            return max(known, 2)
        training = self._training
        about_each = 16 + 1 + 4 + 2 * training.sketch_rows * len(self._layout.groups)
        left = cap - self._vector_bytes - known * about_each
        return max(1, 1 + left // self._vector_bytes)

    def _cluster(self, previous: NDArray[np.int64]) -> NDArray[np.int64]:
        points = cluster_points(self._sketches(self._models))
        most = self._most_members(len(points))
        return assign_clusters(points, previous, most, self._settings.clusters)

    def _sketches(self, models: DeviceModels) -> Floats:
        vectors, training = models.vectors, self._training
        return gap_sketches(
            vectors, self._model, self._places[0], self._ladder.layouts[0], training
        )


class AttentionBinding(Binding[AttentionSettings]):
    """All devices train one model: the task's artifact, or of a ladder of slices each a part."""

    __slots__ = ()
    settings_class = AttentionSettings
    one_model = True

    @property
    def why_no_companions(self) -> str:
        """They are for devices that mix by themselves."""
        if not self.settings.training.aggregator_mixes:
            return ""
        return (
            "are meta-networks, of which devices have no use while the aggregator mixes for them: "
            f"leave them out, or set {self.method_name}.training.aggregator_mixes = false"
        )

    def why_no_control(self, artifacts: int) -> str:
        """Devices can where the artifact brings its first values."""
        return "" if artifacts == 1 else "a rung brings no values of its own to begin with"

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> AttentionMethod:
        """Begins with the full artifact's own parameters, and where the task names no learning
        rate with its own: devices are told it, so that it can fall."""
        submodels = submodels_of(artifacts)
        ladder = FlatLadder.of([artifact.manifest for artifact in artifacts])
        *_, full = artifacts
        buffers = [name for name in trained_of(full)[1] if name in full.manifest.moved]
        if submodels and buffers:
            raise ValueError(
                f"{buffers[0]!r} is a buffer, of which a ladder's rungs bring no first values, and "
                "attention shares parameters alone: use group or layer norm, or one artifact"
            )
        for each in artifacts if submodels else ():
            if lacking := sorted(full.manifest.moved.keys() - each.manifest.moved.keys()):
                raise ValueError(
                    f"the rung {each.manifest.name} does not train {lacking[0]!r}; attention "
                    "compares whole models: a ladder of widths, each trained in full"
                )
        settings, training = self.settings, self.settings.training
        hyper = {port.of: port.default for port in full.manifest.graphs["train"].select("hyper")}
        rate = training.learning_rate or hyper.get("lr") or 0.0
        settings = replace(settings, training=replace(training, learning_rate=rate))
        return AttentionMethod(ladder.full.flatten(full.initial), ladder, settings)
