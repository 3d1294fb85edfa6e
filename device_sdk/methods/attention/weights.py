"""The meta-network's weights, from what it has learned and from sketches; nothing is fetched.

The formulas are those of docs/methods/attention.md, which the exported graph differentiates. The
arrays are small, and NumPy is through with them before a session has bound its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.trainer import Trainer

__all__ = ["favoured", "layer_weights"]

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
