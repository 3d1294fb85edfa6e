"""Makes the workload: Tessera's own learners draw it, and what they come to is what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.peers.workload import Floats, Rows, Workload
from benchmarks.simulation import scatter_fleet
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.factor_step import (
    FactorBatch,
    FactorGradients,
    FactorStep,
    NumpyStep,
)
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.wire.arrays.exchange import Update

# The items move by so much of the sum of all devices' gradients: far enough to tell a difference.
_SHARE_OF_SUM = 0.01
_SPREAD = 0.1


class Fleet:
    """One device a user at its start, and the aggregator's half, which does no more than its peers:
    a mean of the gradients and a plain step. No limits follow the norms, and there is no Adam.

    Args:
        positives: for each device's one user the item rows of its interactions.
        items: number of items.
        columns: K, and every device's k.
        seed: of all draws.
        step: computes the gradients.
    """

    def __init__(
        self, positives: Sequence[Rows], items: int, columns: int, seed: int, step: FactorStep
    ) -> None:
        of_fleet, of_items = np.random.SeedSequence(seed).spawn(2)
        widths = np.full(len(positives), columns, dtype=np.int64)
        self.learners = scatter_fleet(
            [[rows] for rows in positives], widths, step, of_fleet, PoolSettings(0.5)
        )
        plain = OptimizerSettings("plain", learning_rate=_SHARE_OF_SUM * len(positives))
        settings = ScatterSettings(loss="bpr", optimizer=plain, clip_multiple=0.0, row_multiple=0.0)
        first = initial_items(items, columns, _SPREAD, np.random.default_rng(of_items))
        self.method = ScatterMethod(first, settings)

    def round(self, number: int, together: int = 1) -> Iterator[Update]:
        """Round ``number``, from 1: so many devices train in one call, by default each alone; an
        update is absorbed and then handed on."""
        broadcast = self.method.open_round(number)
        for start in range(0, len(self.learners), together):
            group = self.learners[start : start + together]
            for update in ScatterLearner.train_many(group, broadcast):
                if isinstance(update, LearnerError):
                    raise update
                self.method.check(update)
                self.method.absorb(update)
                yield update
        self.method.close_round()

    @property
    def users(self) -> Floats:
        """All devices' users, float32 [devices, k]; empty before the first round."""
        return np.concatenate([learner.state()["users"] for learner in self.learners])


def record(positives: Sequence[Rows], items: int, columns: int, rounds: int, seed: int) -> Workload:
    """Runs ``rounds`` rounds of a :class:`Fleet`, and notes what each device trained on.

    Raises ValueError when a device has nothing to train on, LearnerError when one fails.
    """
    step = _NotedStep()
    fleet = Fleet(positives, items, columns, seed, step)
    first_items, first_users = fleet.method.items, []
    taken = []
    for number in range(rounds):
        batches = []
        for update in fleet.round(number + 1):
            if step.users is None or step.batch is None:
                raise ValueError(f"device {len(batches)} has nothing to train on")
            if number == 0:
                first_users.append(step.users)
            # A device counts through the rows that it touches.
            rows = update.tensors["rows"]
            positive, negative = rows[step.batch.positive], rows[step.batch.negative]
            batches.append(replace(step.batch, positive=positive, negative=negative))
            step.users = step.batch = None
        taken.append(batches)
    begin = np.cumsum([0, *(len(batch.user) for batch in taken[0])])
    weight = np.concatenate([batch.weight for batch in taken[0]])
    training = ScatterSettings().training
    sizes = np.add.reduceat(weight, begin[:-1], dtype=np.float64)
    rates = training.user_learning_rate / np.sqrt(np.maximum(sizes, 1))
    return Workload(
        items=first_items,
        users=np.concatenate(first_users),
        begin=begin,
        positive=np.concatenate([batch.positive for batch in taken[0]]),
        weight=weight,
        negative=np.stack(
            [np.concatenate([batch.negative for batch in batches]) for batches in taken]
        ),
        user_rates=rates.astype(np.float32),
        user_l2=training.user_l2,
        item_l2=training.item_l2,
        seed=seed,
        server_rate=_SHARE_OF_SUM * len(positives),
        final_items=fleet.method.items,
        final_users=fleet.users,
    )


def positives_of(workload: Workload) -> list[Rows]:
    """What was recorded: by device the item rows of its interactions, which have weight 1."""
    parts = map(workload.part, range(workload.devices))
    return [workload.positive[part][workload.weight[part] == 1] for part in parts]


class _NotedStep:
    """NumPy's step, which keeps what it was last asked for."""

    def __init__(self) -> None:
        self._step = NumpyStep()
        self.users: Floats | None = None
        self.batch: FactorBatch | None = None

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        self.users, self.batch = users.copy(), batch
        return self._step.gradients(users, items, batch)
