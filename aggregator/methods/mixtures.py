"""The devices' last models, and the mixtures of them that the aggregator makes by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.fields import Declared, Within
from device_sdk.wire.arrays.exchange import Update


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModels:
    """The last models of n devices, in the order in which these were first heard of.

    ``senders``: names. ``vectors`` float32 [n, p]: in the widest layout, zero where a model has
    nothing. ``widths``, ``samples`` int64 [n]: the model's layout, and its training samples.
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
    def of(cls, updates: Iterable[Update], layouts: Sequence[FlatLayout]) -> DeviceModels:
        """What these say; ``layouts`` are of all widths, the narrowest first."""
        each = list(updates)
        said = [update.metadata for update in each]
        places = [layout.places_in(layouts[-1]) for layout in layouts]
        vectors = np.zeros((len(each), layouts[-1].size), dtype=np.float32)
        for vector, update in zip(vectors, each, strict=True):
            vector[places[int(update.metadata["width"])]] = update.tensors["vector"]
        return cls(
            tuple(update.sender for update in each),
            vectors,
            np.asarray([one["width"] for one in said], dtype=np.int64),
            np.asarray([one["samples"] for one in said], dtype=np.int64),
            np.asarray([one["mixture"] for one in said], dtype=np.bool_),
        )


Floats = NDArray[Any]
Rule = Literal["sketches", "fedamp"]


@dataclass(frozen=True, slots=True)
class MixtureSettings(Declared):
    """How the aggregator mixes for a device that does not mix by itself.

    Attributes:
        rule: ``sketches`` is the device's two layers with the identity in the place of what a
            device learns; ``fedamp`` is FedAMP's attention (Huang et al. 2021, Personalized
            cross-silo federated learning on non-IID data, eq. 5 and section 3.2).
        sharpness: ``sketches`` weighs by exp(-this / 2 * the sketches' mean squared distance).
        own_bias: ``sketches`` gives (the neighbours' mixture, w_g) the shares softmax([this, 0]).
        amp_rate: alpha / sigma of FedAMP, the weight of a neighbour at distance 0.
        amp_sigma: sigma of FedAMP, as a multiple of the mean squared distance between the
            cluster's devices (the scale of parameters means nothing by itself).

    Raises ValueError, naming the setting, for a value outside its range.
    """

    rule: Rule = "sketches"
    sharpness: Annotated[float, Within(0, 1e6, above=True)] = 4.0
    own_bias: Annotated[float, Within(-100, 100)] = 0.0
    amp_rate: Annotated[float, Within(0, 1e6, above=True)] = 0.5
    amp_sigma: Annotated[float, Within(0, 1e6, above=True)] = 0.5


class AggregatorMixer:
    """Mixes for one device at a time, out of what the aggregator holds in a round.

    Args:
        models: the known devices', in the widest layout.
        layouts: of all widths, the narrowest first.
        shared: w_g, float32 [p] of the widest layout.
        sketches: float32 [n, g, d].
        own_weight: see :class:`~device_sdk.methods.attention.contract.AttentionTraining`.
    """

    def __init__(
        self,
        models: DeviceModels,
        layouts: Sequence[FlatLayout],
        shared: Floats,
        sketches: Floats,
        settings: MixtureSettings,
        own_weight: float = 0.0,
    ) -> None:
        self._models = models
        self._layouts = layouts
        self._places = [layout.places_in(layouts[-1]) for layout in layouts]
        self._shared = shared
        self._sketches = sketches
        self._settings = settings
        self._own_weight = own_weight

    def mixture(self, row: int, cluster: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the device in ``row`` is to start from, float32 [p] in its own layout.

        ``cluster``: the rows of its cluster, its own among them. Alone it gets the global model.
        """
        models = self._models
        places = self._places[models.widths[row]]
        peers = cluster[cluster != row]
        if len(peers) == 0:
            return np.asarray(self._shared[places], dtype=np.float32)
        vectors = np.stack([self._seen_by(row, int(peer)) for peer in peers])
        own = models.vectors[row][places]
        if self._settings.rule == "fedamp":
            weights = self._amp_weights(row, cluster)
            mixed = weights @ vectors + (1 - weights.sum()) * own
            return np.asarray(mixed, dtype=np.float32)
        weights = sketch_weights(
            self._sketches[row], self._sketches[peers], self._settings.sharpness, self._own_weight
        )
        heard = weights @ np.concatenate([vectors, own[None]])
        share = 1 / (1 + math.exp(-self._settings.own_bias))
        mixed = share * heard + (1 - share) * self._shared[places]
        return np.asarray(mixed, dtype=np.float32)

    def _amp_weights(self, row: int, cluster: NDArray[np.int64]) -> Floats:
        """Distances are over the block that all widths have."""
        common = self._models.vectors[cluster][:, self._places[0]].astype(np.float64)
        mine = self._models.vectors[row][self._places[0]]
        squared = ((common - mine) ** 2).sum(axis=1)[cluster != row]
        # Mean over all pairs: twice the variance, without the zeros of each with itself.
        spread = 2 * ((common - common.mean(axis=0)) ** 2).sum(axis=1).mean()
        scale = spread * len(cluster) / (len(cluster) - 1)
        return amp_weights(squared, self._settings, float(scale))

    def _seen_by(self, row: int, peer: int) -> Floats:
        """A peer's model in the layout of the device in ``row``, whose own fills what it lacks."""
        models = self._models
        whole = models.vectors[row].copy()
        places = self._places[models.widths[peer]]
        whole[places] = models.vectors[peer][places]
        found: Floats = whole[self._places[models.widths[row]]]
        return found


def sketch_weights(
    query: Floats, sketches: Floats, sharpness: float, own_weight: float = 0.0
) -> Floats:
    """Weights of n neighbours and the own network, [n + 1], which sum to 1.

    ``query`` [g, d], ``sketches`` [n, g, d], n at least 1; ``own_weight`` in units of the favourite
    neighbour's. They are those with which a device's attention starts at this ``key_scale``.
    """
    scores = -sharpness / 2 * ((sketches - query) ** 2).sum(axis=2).mean(axis=1)
    weights = np.append(np.exp(scores - scores.max()), own_weight)
    shares: Floats = weights / weights.sum()
    return shares


def amp_weights(squared: Floats, settings: MixtureSettings, scale: float) -> Floats:
    """FedAMP's weights xi of n neighbours at these squared distances, [n]; the own weight is what
    is left to 1.

    ``scale``: mean squared distance between the cluster's devices.
    """
    sigma = settings.amp_sigma * max(scale, 1e-12)
    weights = settings.amp_rate * np.exp(-squared / sigma)
    total = float(weights.sum())
    return weights / total if total > 1 else weights
