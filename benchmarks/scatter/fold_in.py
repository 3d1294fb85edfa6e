"""`python -m benchmarks.scatter.fold_in`: a new user's vector by fold-in and by a device.

ML-100K, validation items: the fleet's matrix is trained by all users but each tenth. Those get a
vector three ways: by a device that joins, trains its one user against the finished matrix for
`--rounds` rounds and never sends; by the fold-in graph of `tessera-aggregator model`, in stock
onnxruntime; and by ridge regression on the likes (Hu et al. 2008), which asks for all scores of
unliked items to be 0 and is what one would take without knowing the device's loss.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tabulate import tabulate

from aggregator.methods.scatter import ScatterMethod, initial_items
from aggregator.models.factor_graphs import fold_in_graph
from aggregator.simulate.engine import Simulation
from aggregator.simulate.scatter_fleet import FixedInteractions, scatter_fleet
from benchmarks.recommendation.metrics import full_ranks, quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, load_split_of
from benchmarks.scatter.presets import preset
from device_sdk.methods.scatter.factor_step import FactorStep, NumpyStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Broadcast

Floats = NDArray[np.float32]
_EVERY = 10


def trained_items(split: LeaveOneOut, epochs: int, settings: object, width: int) -> Floats:
    """V of a fleet of one device a user, float32 [items, K]."""
    seeds = np.random.SeedSequence(7)
    learners = scatter_fleet(
        [[rows] for rows in split.train], [width] * split.users, NumpyStep(), seeds
    )
    first = initial_items(split.items, width, 0.01, np.random.default_rng(1))
    method = ScatterMethod(first, settings)  # type: ignore[arg-type]
    simulation = Simulation(method, learners, np.random.default_rng(2))
    for epoch in range(epochs):
        for _ in simulation.epoch(256):
            pass
        print(f"epoch {epoch + 1}/{epochs}", end="\r", flush=True)
    return method.items


def of_a_device(
    items: Floats,
    liked: NDArray[np.int64],
    told: Broadcast,
    rounds: int,
    pool: PoolSettings,
    step: FactorStep,
    seed: int = 3,
) -> Floats:
    """The vector of a device's user after so many rounds, the rate falling to a hundredth."""
    learner = ScatterLearner(
        FixedInteractions([liked]), step, items.shape[1], np.random.default_rng(seed), pool
    )
    rate = float(told.settings["user_learning_rate"])
    for number in range(rounds):
        settings = {**told.settings, "user_learning_rate": rate * 0.01 ** (number / rounds)}
        learner.train(replace(told, round_id=number + 1, settings=settings))
    return learner.users[0]


def by_ridge(items: Floats, liked: NDArray[np.int64], weight: float, l2: float) -> Floats:
    """argmin over u of sum over all (u.v)^2 + weight * sum over liked (u.v - 1)^2 + l2 |u|^2."""
    own = items[liked].astype(np.float64)
    gram = items.T.astype(np.float64) @ items + weight * own.T @ own
    return np.asarray(
        np.linalg.solve(gram + l2 * np.eye(len(gram)), weight * own.sum(0)), np.float32
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=0, help="default: the preset's")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    whole = load_split_of(Path(os.environ["TESSERA_DATA"]), "ml-100k", "validation")
    base = preset("ml-100k", "validation", 0)
    new = np.arange(0, whole.users, _EVERY)
    old = np.setdiff1d(np.arange(whole.users), new)
    fleet, joining = _of(whole, old), _of(whole, new)
    items = trained_items(fleet, arguments.epochs or base.epochs, base.settings, base.width)

    training = base.settings.training
    told = Broadcast(1, 1, {"items": items}, training.as_scalars())
    session = ort.InferenceSession(fold_in_graph(items, training.user_l2, {}, ("tessera", "0")))
    start = time.perf_counter()
    folded = np.concatenate([session.run(None, {"liked": rows})[0] for rows in joining.train])
    seconds = (time.perf_counter() - start) / len(new)
    step, rounds = NumpyStep(), arguments.rounds
    plain = PoolSettings(pseudo_per_positive=0.0)

    def devices(pool: PoolSettings, seed: int = 3) -> Floats:
        return np.stack(
            [of_a_device(items, each, told, rounds, pool, step, seed) for each in joining.train]
        )

    usual = devices(PoolSettings())
    ways = {
        "fold-in graph": folded,
        "device, no pseudo-items": devices(plain),
        "device, default": usual,
        "device, default, other draws": devices(PoolSettings(), 4),
        "ridge": np.stack([by_ridge(items, each, 10.0, 1.0) for each in joining.train]),
    }
    lines = []
    for name, users in ways.items():
        sampled = quality(sampled_ranks(users, items, joining))
        full = quality(full_ranks(users, items, joining))
        lines.append(
            {
                "vector": name,
                "HR@10 of 99": f"{sampled.hit_ratio:.4f}",
                "NDCG@10 of 99": f"{sampled.ndcg:.4f}",
                "HR@10 of all": f"{full.hit_ratio:.4f}",
                "cosine to fold-in": f"{_cosines(users, folded).mean():.4f}",
                "of its ten best in fold-in's": f"{_shared(users, folded, items, joining):.3f}",
                "in a default device's": f"{_shared(users, usual, items, joining):.3f}",
            }
        )
    print(f"{len(new)} new users of {whole.users}; fold-in {1000 * seconds:.0f} ms each")
    print(tabulate(lines, headers="keys", tablefmt="pipe"))


def _of(split: LeaveOneOut, users: NDArray[np.int64]) -> LeaveOneOut:
    return LeaveOneOut(
        split.items,
        tuple(split.train[user] for user in users),
        split.held_out[users],
        tuple(split.negatives[user] for user in users),
    )


def _cosines(a: Floats, b: Floats) -> Floats:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(1) / np.maximum(lengths, 1e-12), np.float32)


def _shared(a: Floats, b: Floats, items: Floats, split: LeaveOneOut) -> float:
    shares = []
    for mine, other, seen in zip(a, b, split.train, strict=True):
        best = []
        for user in (mine, other):
            scores = items @ user
            scores[seen] = -np.inf
            best.append(set(np.argsort(-scores, kind="stable")[:10].tolist()))
        shares.append(len(best[0] & best[1]) / 10)
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
