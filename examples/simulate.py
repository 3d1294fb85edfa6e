"""A federated fleet in one process, in under a minute: the smallest use of the simulator.

    python -m examples.simulate                      # synthetic tastes, nothing to download
    TESSERA_DATA=../shared/data python -m examples.simulate --data ml-100k --epochs 60

Devices of four capacity classes train 8, 16, 32 or 64 of 64 columns each; the aggregator only sees
their item gradients. Then one user's recommendations are made as on the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.simulate.engine import Simulation
from aggregator.simulate.scatter_fleet import mixed_columns, scatter_fleet
from benchmarks.harness import default_data_folder
from benchmarks.recommendation.metrics import quality, sampled_ranks
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation, load_split
from device_sdk import Trainer
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import TrainerStep

_COLUMNS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fleet; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", choices=("synthetic", "ml-100k", "ml-1m"), default="synthetic")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the fleet")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bits")
    parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")
    options = parser.parse_args(arguments)

    split = _data(options.data, options.seed)
    step = TrainerStep(Trainer(options.artifact or packaged_artifact(), providers="cpu"))
    dealing, start, cohorts, fleet = np.random.SeedSequence(options.seed).spawn(4)
    columns = mixed_columns(split.users, (8, 16, 32, 64), np.random.default_rng(dealing))
    learners = scatter_fleet([[rows] for rows in split.train], columns, step, fleet)
    items = initial_items(split.items, _COLUMNS, 0.01, np.random.default_rng(start))
    method = ScatterMethod(items, ScatterSettings())
    simulation = Simulation(method, learners, np.random.default_rng(cohorts))

    for epoch in range(1, options.epochs + 1):
        devices = sum(summary.participants for summary in simulation.epoch(cohort=128))
        if epoch % 5 == 0 or epoch == options.epochs:
            users = np.concatenate([learner.users for learner in learners])
            found = quality(sampled_ranks(users, method.items, split))
            print(
                f"epoch {epoch:3}: {devices} devices, HR@10 {found.hit_ratio:.3f}, "
                f"NDCG@10 {found.ndcg:.3f}"
            )
    best = learners[0].recommend(method.items, user=0, count=5)
    listed = ", ".join(f"item {row} ({score:.2f})" for row, score in best)
    print(f"device 0 (k = {columns[0]}) recommends {listed}")
    return 0


def _data(name: str, seed: int) -> LeaveOneOut:
    """The data with a validation item held out: examples do not look at test items."""
    rng = np.random.default_rng(seed)
    if name != "synthetic":
        whole = load_split(default_data_folder(), name)
        return hold_out_validation(whole.train, whole.items, rng, latest=name == "ml-100k")
    print("synthetic data: 300 users of 6 tastes, 400 items")
    tastes = rng.dirichlet(np.full(400, 0.1), size=6)
    liked = [rng.choice(400, size=30, replace=False, p=_mix(tastes, rng)) for _ in range(300)]
    return hold_out_validation(liked, 400, rng, latest=False)


def _mix(tastes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    share: np.ndarray = 0.9 * tastes[rng.integers(len(tastes))] + 0.1 / tastes.shape[1]
    share /= share.sum()
    return share


if __name__ == "__main__":
    raise SystemExit(main())
