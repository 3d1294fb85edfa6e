"""The attention meta-network at work: mixtures, meta-steps, and whom it favours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.learners.attention_fleet import Neighbours
from device_sdk.learners.learner import LearnerError
from device_sdk.trainer import Trainer
from device_sdk.wire.attention_settings import AttentionTraining

__all__ = ["SCORE_NAMES", "AttentionScores", "Mixer", "favoured", "scores_of"]

Floats = NDArray[np.float32]
_NOTHING = np.zeros((), dtype=np.float32)
SCORE_NAMES = ("scores.neighbours", "scores.first", "scores.second", "scores.round")
"""Of a learner's state: uint8 [n, 16], float32 [g, n], float32 [g, 2], int64."""


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
        """As a learner keeps them: ``SCORE_NAMES``; copies."""
        names = np.frombuffer(bytes.fromhex("".join(self.neighbours)), dtype=np.uint8)
        arrays = (
            names.reshape(-1, 16).copy(),
            self.first.copy(),
            self.second.copy(),
            np.asarray(self.round_id, dtype=np.int64),
        )
        return dict(zip(SCORE_NAMES, arrays, strict=True))


class Mixer:
    """Mixes one round's neighbours with the meta-network in ``meta``, and trains it.

    Args:
        meta: of the artifact that ``export.models.attention_meta`` writes.
        name: this device's own.
        own, shared: w_i and w_g, float32 [p].
        query: s_i, float32 [g, d].
    """

    def __init__(
        self,
        meta: Trainer,
        training: AttentionTraining,
        neighbours: Neighbours,
        name: str,
        own: Floats,
        shared: Floats,
        query: Floats,
    ) -> None:
        self._meta = meta
        self._hyper = {"lr": training.meta_learning_rate}
        vectors, sketches, names = neighbours.vectors, neighbours.sketches, neighbours.names
        if training.include_self and training.layers != "second":
            vectors = np.concatenate([vectors, own[None]])
            sketches = np.concatenate([sketches, query[None]])
            names = (*names, name)
        own_weight = training.own_weight if training.layers != "second" else 0.0
        self._names = (*names, name) if own_weight else names
        if len(vectors) == 0:
            # Layer 2 alone: the graph wants a row, and gives it no weight.
            vectors, sketches = own[None], np.zeros_like(query)[None]
        self._fixed: dict[str, NDArray[Any]] = {
            "neighbours": np.ascontiguousarray(vectors),
            "sketches": np.ascontiguousarray(sketches),
            "shared": shared,
            "own": own,
            "query": query,
            "first": np.asarray(training.layers != "second", dtype=np.float32),
            "second": np.asarray(training.layers != "first", dtype=np.float32),
            "own_weight": np.asarray(own_weight, dtype=np.float32),
        }
        self._rest = np.zeros_like(own)
        self._weights: tuple[Floats, Floats] | None = None

    def mix(self) -> Floats:
        """The mixture, float32 [p]."""
        found = self._meta.predict({**self._fixed, "drift": self._rest})
        self._weights = (found["first"][:, : len(self._names)], found["second"])
        return found["mixed"]

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
        others = {**batch, **self._fixed, "drift": drift, "own_weight": _NOTHING}
        return self._meta.step(others, hyper=self._hyper)


def favoured(meta: Trainer, query: Floats, sketches: Floats, count: int) -> list[int]:
    """The ``count`` rows of ``sketches`` [n, g, d] that layer 1 favours, mean over the groups.

    Computed from the sketches alone, before any vector is fetched. Where attention is still
    uniform, likeness of the sketches decides.
    """
    parameters = meta.parameters
    queries = np.einsum("grd,gd->gr", parameters["queries"], query)
    toward = np.einsum("grd,gr->gd", parameters["keys"], queries)
    scores = np.einsum("ngd,gd->gn", sketches, toward) / np.sqrt(parameters["queries"].shape[1])
    scores -= parameters["likeness"] @ ((sketches - query) ** 2).sum(axis=2).T / 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    lengths = np.linalg.norm(sketches, axis=2) * np.linalg.norm(query, axis=1)
    likeness = np.einsum("ngd,gd->ng", sketches, query) / np.maximum(lengths, 1e-12)
    # Rounded, so that weights that differ by float noise alone count as equal.
    order = np.lexsort((-likeness.mean(axis=1), -weights.mean(axis=0).round(5)))
    return sorted(int(row) for row in order[:count])


def scores_of(state: Mapping[str, NDArray[Any]]) -> AttentionScores | None:
    """The scores in an attention learner's state; None where it has not listened yet.

    Raises ValueError where they do not have the dtypes and shapes of scores.
    """
    held = {name: state[name] for name in SCORE_NAMES if name in state}
    if not held:
        return None
    if len(held) < len(SCORE_NAMES):
        raise ValueError(f"the state holds {sorted(held)} only; expected {sorted(SCORE_NAMES)}")
    who, first, second, round_id = (held[name] for name in SCORE_NAMES)
    groups, n = (len(second) if second.ndim else 0), (len(who) if who.ndim else 0)
    fits = (
        (who.dtype == np.uint8 and who.shape == (n, 16))
        and (first.dtype == np.float32 and first.shape == (groups, n))
        and (second.dtype == np.float32 and second.shape == (groups, 2))
        and (round_id.dtype == np.int64 and round_id.shape == ())
        and bool(np.isfinite(first).all() and np.isfinite(second).all())
    )
    if not fits:
        raise ValueError("the state's scores do not have the dtypes and shapes of scores")
    names = tuple(row.tobytes().hex() for row in who)
    return AttentionScores(int(round_id), names, first.copy(), second.copy())
