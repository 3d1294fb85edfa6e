"""The attention meta-network at work: mixtures, meta-steps, and whom it listened to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.fleet import Neighbours
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.state import Entry, unpack
from device_sdk.trainer import Trainer

# The meta-network's weights, from what it has learned and from sketches; nothing is fetched.
#
# The formulas are those of docs/methods/attention.md, which the exported graph differentiates.
# The arrays are small, and NumPy is through with them before a session has bound its inputs.

Floats = NDArray[np.float32]
Learned = Mapping[str, NDArray[Any]]


def layer_weights(
    learned: Learned, query: Floats, sketches: Floats, own_weight: float, second: bool
) -> tuple[Floats, Floats]:
    """Layer 1's weights of the n neighbours and the own network, float32 [g, n + 1], and layer 2's
    of (their mixture, the global model), float32 [g, 2].

    Args:
        learned: the meta-network's parameters.
        query: s_i, float32 [g, d].
        sketches: s_j, float32 [n, g, d], n at least 1.
        own_weight: of the own network, in units of the favourite neighbour's.
        second: whether layer 2 takes part; else the global model has no share.
    """
    asked = _asked(learned, query)
    heard = _neighbour_weights(learned, asked, query, sketches)
    own = own_weight * heard.max(axis=1, keepdims=True)
    first = np.concatenate([heard, own], axis=1) / (1 + own)
    share = np.zeros(len(first), dtype=np.float32)
    if second:
        mixed = _each(first[:, :-1], sketches.transpose(1, 0, 2)) + first[:, -1:] * query
        likes = (mixed * _each(asked, learned["second_keys"])).sum(axis=1)
        # The logistic function, without overflow.
        share = (1 + np.tanh((learned["bias"][:, 1] - learned["bias"][:, 0] - likes) / 2)) / 2
    return first, np.stack([1 - share, share], axis=1)


def favoured(meta: Trainer, query: Floats, sketches: Floats, count: int) -> list[int]:
    """The ``count`` rows of ``sketches`` [n, g, d] that layer 1 favours, mean over the groups.

    Where attention is still uniform, likeness of the sketches decides.
    """
    learned = meta.parameters
    weights = _neighbour_weights(learned, _asked(learned, query), query, sketches)
    lengths = np.linalg.norm(sketches, axis=2) * np.linalg.norm(query, axis=1)
    likeness = np.einsum("ngd,gd->ng", sketches, query) / np.maximum(lengths, 1e-12)
    # Rounded, so that weights that differ by float noise alone count as equal.
    order = np.lexsort((-likeness.mean(axis=1), -weights.mean(axis=0).round(5)))
    return sorted(int(row) for row in order[:count])


def _asked(learned: Learned, query: Floats) -> Floats:
    """q / sqrt(r), float32 [g, r]."""
    queries = learned["queries"]
    return _each(query, queries.transpose(0, 2, 1)) / math.sqrt(queries.shape[1])


def _neighbour_weights(learned: Learned, asked: Floats, query: Floats, sketches: Floats) -> Floats:
    """Layer 1's weights of the neighbours alone, float32 [g, n], each group's sum 1."""
    scores = _each(_each(asked, learned["keys"]), sketches.transpose(1, 2, 0))
    scores -= learned["likeness"] @ ((sketches - query) ** 2).sum(axis=2).T / 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Floats = weights / weights.sum(axis=1, keepdims=True)
    return found


def _each(vectors: Floats, matrices: NDArray[Any]) -> Floats:
    """Each group's vector [g, a] times its matrix [g, a, b]: [g, b]."""
    found: Floats = (vectors[:, None] @ matrices)[:, 0]
    return found


SCORES = "scores."
_SCORES = {
    "scores.neighbours": Entry(np.uint8, ("neighbours", 16)),
    "scores.first": Entry(np.float32, ("groups", "neighbours")),
    "scores.second": Entry(np.float32, ("groups", 2)),
    "scores.round": Entry(np.int64),
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScores:
    """Whom a device listened to in a round (papers/fedamn, figure 5).

    ``first`` float32 [g, n]: for each parameter group the weights of ``neighbours``, which sum to
    1 (the device itself may be one of them). ``second`` float32 [g, 2]: the shares of their mixture
    and of the global model.
    """

    round_id: int
    neighbours: tuple[str, ...]
    first: Floats
    second: Floats

    def state(self) -> dict[str, NDArray[Any]]:
        """As a learner keeps them, under ``scores.``; copies."""
        names = np.frombuffer(bytes.fromhex("".join(self.neighbours)), dtype=np.uint8)
        arrays = (
            names.reshape(-1, 16).copy(),
            self.first.copy(),
            self.second.copy(),
            np.asarray(self.round_id, dtype=np.int64),
        )
        return dict(zip(_SCORES, arrays, strict=True))


class Mixer:
    """Mixes one round's neighbours with the meta-network in ``meta``, and trains it.

    Args:
        meta: of the artifact that ``export.models.attention_meta`` writes.
        layout: of the base network.
        name: this device's own.
        own, shared: w_i and w_g, float32 [p].
        query: s_i, float32 [g, d].
    """

    def __init__(
        self,
        meta: Trainer,
        training: AttentionTraining,
        layout: FlatLayout,
        neighbours: Neighbours,
        name: str,
        own: Floats,
        shared: Floats,
        query: Floats,
    ) -> None:
        self._meta = meta
        self._hyper = {"lr": training.meta_learning_rate}
        vectors, sketches, names = neighbours.vectors, neighbours.sketches, neighbours.names
        self._own_weight, self._second = training.own_weight, training.layers != "first"
        if training.layers == "second":
            # The only neighbour has all of layer 1's weight, whatever is learned: w_i takes it.
            vectors, sketches, names = own[None], query[None], ()
            self._own_weight = 0.0
        elif training.include_self:
            vectors = np.concatenate([vectors, own[None]])
            sketches = np.concatenate([sketches, query[None]])
            names = (*names, name)
        self._names = (*names, name) if self._own_weight else names
        self._spans = layout.spans
        self._shared = shared
        self._own = own - shared
        # Of each group apart, so that neither NumPy nor the graph copies a part of each row.
        self._moved = [vectors[:, start:end] - shared[start:end] for start, end in self._spans]
        self._query, self._sketches = query, sketches
        self._fixed: dict[str, NDArray[Any]] = {
            **{f"neighbours.{group}": moved for group, moved in enumerate(self._moved)},
            "sketches": sketches,
            "query": query,
            "second": np.asarray(self._second, dtype=np.float32),
        }
        self._weights: tuple[Floats, Floats] | None = None

    def mix(self) -> Floats:
        """The mixture, float32 [p]."""
        first, second = layer_weights(
            self._meta.parameters, self._query, self._sketches, self._own_weight, self._second
        )
        self._weights = (first[:, : len(self._names)], second)
        weights = second[:, :1] * first
        mixed = self._shared.copy()
        for (start, end), moved, row in zip(self._spans, self._moved, weights, strict=True):
            mixed[start:end] += row[:-1] @ moved
            if self._own_weight:
                mixed[start:end] += row[-1] * self._own[start:end]
        return mixed

    def scores(self, round_id: int) -> AttentionScores:
        """The weights of the last mixture; raises LearnerError where there was none."""
        if self._weights is None:
            raise LearnerError("nothing was mixed in this round")
        return AttentionScores(round_id, self._names, *self._weights)

    def step(self, batch: Mapping[str, NDArray[Any]], drift: Floats) -> float:
        """One meta-step on samples that this round's base steps do not see.

        The base network stands at the others' mixture plus ``drift``, what its own steps have
        moved: ``own_weight`` counts as 0, for the own network has met these samples in earlier
        rounds, and attention would learn to listen to whoever resembles it. Returns the loss there.
        """
        start = self._shared + drift
        return self._meta.step({**batch, **self._fixed, "start": start}, hyper=self._hyper)


def scores_of(state: Mapping[str, NDArray[Any]]) -> AttentionScores | None:
    """The scores in an attention learner's state; None where it has not listened yet.

    Raises ValueError where they do not have the dtypes and shapes of scores.
    """
    held = {name: array for name, array in state.items() if name.startswith(SCORES)}
    if not held:
        return None
    who, first, second, round_id = unpack(_SCORES, held).values()
    names = tuple(row.tobytes().hex() for row in who)
    return AttentionScores(int(round_id), names, first, second)
