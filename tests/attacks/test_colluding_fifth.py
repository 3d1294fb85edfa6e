"""Devices that collude are no one device: what a fifth of a fleet does to recommendations."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from benchmarks.simulation import Simulation, scatter_fleet
from device_sdk.evaluation.metrics import full_rank
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.train.scatter import factor_step
from device_sdk.wire.arrays.exchange import Broadcast, Update

ITEMS, HONEST, COLLUDING, K = 400, 80, 20, 64
PROMOTED = ITEMS - 1
"""An item that nobody has."""


def tastes() -> list[list[np.ndarray]]:
    """Of each device the films of its one user, of six genres."""
    rng = np.random.default_rng(0)
    genres = rng.dirichlet(np.full(PROMOTED, 0.1), size=6)
    found = []
    for _ in range(HONEST + COLLUDING):
        likes = 0.9 * genres[rng.integers(len(genres))] + 0.1 / PROMOTED
        found.append([np.sort(rng.choice(PROMOTED, 30, replace=False, p=likes / likes.sum()))])
    return found


class Promoter:
    """From some round on a device that pulls the promoted item alone, towards what all like, with
    the length of vector that it has anyway."""

    def __init__(self, honest: ScatterLearner) -> None:
        self.honest = honest
        self.promotes = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.honest, name)

    @classmethod
    def train_many(cls, learners: list[Promoter], broadcast: Broadcast) -> list[Update]:
        return [each.train(broadcast) for each in learners]

    def train(self, broadcast: Broadcast) -> Update:
        update = self.honest.train(broadcast)
        if not self.promotes:
            return update
        factor = update.tensors["factor"]
        liked = broadcast.tensors["items"][:PROMOTED].astype(np.float64).mean(axis=0)
        liked *= broadcast.tensors["strengths"]
        liked *= np.linalg.norm(factor) / np.linalg.norm(liked)
        tensors = {
            "rows": np.array([PROMOTED]),
            "pulls": np.full((1, *update.tensors["pulls"].shape[1:]), -3.0, np.float32),
            "factor": np.broadcast_to(liked.astype(np.float32), factor.shape).copy(),
            "counts": np.ones(1, np.int64),
        }
        return replace(update, tensors={**update.tensors, **tensors})


def reached(item_multiple: float) -> list[int]:
    """After each of 20 rounds, in the 6th and 7th of which a fifth of the fleet promotes: how many
    of the honest users have the item among their ten best."""
    likes = tastes()
    learners = scatter_fleet(
        likes,
        [K] * len(likes),
        factor_step(packaged_artifact()),
        np.random.SeedSequence(1),
    )
    promoters = [Promoter(each) for each in learners[:COLLUDING]]
    first = initial_items(ITEMS, K, 0.01, np.random.default_rng(0))
    method = ScatterMethod(first, ScatterSettings("least-squares", item_multiple=item_multiple))
    fleet: list[object] = [*promoters, *learners[COLLUDING:]]
    simulation = Simulation(method, fleet, np.random.default_rng(2))  # type: ignore[arg-type]
    found = []
    for number in range(1, 21):
        for each in promoters:
            each.promotes = number in (6, 7)
        simulation.round()
        broadcast = deepcopy(method).open_round(number + 1)
        users = [each.vectors(broadcast)[0] for each in learners[COLLUDING:]]
        ranks = [
            full_rank(user, broadcast.tensors["items"], PROMOTED, own[0])
            for user, own in zip(users, likes[COLLUDING:], strict=True)
        ]
        found.append(sum(rank < 10 for rank in ranks))
    return found


@pytest.mark.parametrize(("item_multiple", "least", "most"), [(0.0, HONEST, HONEST), (1.25, 0, 8)])
def test_a_colluding_fifth_gets_an_item_that_nobody_has_into_all_lists_unless_vectors_are_bounded(
    item_multiple: float, least: int, most: int
) -> None:
    by_round = reached(item_multiple)
    assert by_round[4] == 0
    assert least <= by_round[6] <= most
    assert by_round[-1] == 0  # rounds without it mend the model
