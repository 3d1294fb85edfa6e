"""Makes the workload: Tessera's own learners draw it, and what they come to is what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from benchmarks.peers.workload import Floats, Rows, Workload
from benchmarks.simulator import Channel, DirectChannel, Simulation, scatter_fleet
from device_sdk.methods.scatter.factor_step import (
    FactorBatch,
    FactorGradients,
    FactorStep,
    NumpyStep,
)
from device_sdk.wire.arrays.exchange import Update

# The items move by so much of the sum of all devices' gradients: far enough to tell a difference.
_SHARE_OF_SUM = 0.01
_SPREAD = 0.1


def simulation_of(
    positives: Sequence[Rows],
    items: int,
    columns: int,
    seed: int,
    step: FactorStep,
    channel: Channel | None = None,
) -> Simulation:
    """A fleet of one device a user at its start, whose method does no more than its peers do.

    That is a mean of the gradients and a plain step: no limits that follow norms, no Adam.

    Args:
        positives: for each device's one user the item rows of its interactions.
        items: number of items.
        columns: K, and every device's k.
        seed: of all draws.
        step: computes the gradients.
        channel: what updates pass through.
    """
    of_fleet, of_items = np.random.SeedSequence(seed).spawn(2)
    widths = np.full(len(positives), columns, dtype=np.int64)
    fleet = scatter_fleet([[rows] for rows in positives], widths, step, of_fleet)
    plain = OptimizerSettings("plain", learning_rate=_SHARE_OF_SUM * len(positives))
    settings = ScatterSettings(optimizer=plain, clip_multiple=0.0, row_multiple=0.0)
    first = initial_items(items, columns, _SPREAD, np.random.default_rng(of_items))
    method = ScatterMethod(first, settings)
    return Simulation(method, fleet, np.random.default_rng(seed), channel)


def record(positives: Sequence[Rows], items: int, columns: int, rounds: int, seed: int) -> Workload:
    """Runs ``rounds`` rounds of :func:`simulation_of`, and notes what each device trained on.

    Raises ValueError when a device does not take part, or has nothing to train on.
    """
    recorder = _Recorder()
    simulation = simulation_of(positives, items, columns, seed, recorder, recorder)
    first, _ = result_of(simulation)
    taken = []
    for _ in range(rounds):
        recorder.batches.clear()
        summary = simulation.round()
        if not len(recorder.batches) == summary.participants == len(positives):
            raise ValueError(f"{summary.participants} of {len(positives)} devices took part")
        taken.append([*recorder.batches])
    final_items, final_users = result_of(simulation)
    begin = np.cumsum([0, *(len(batch.user) for batch in taken[0])])
    weight = np.concatenate([batch.weight for batch in taken[0]])
    training = ScatterSettings().training
    sizes = np.add.reduceat(weight, begin[:-1], dtype=np.float64)
    rates = training.user_learning_rate / np.sqrt(np.maximum(sizes, 1))
    return Workload(
        items=first,
        users=np.concatenate(recorder.first_users),
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
        final_items=final_items,
        final_users=final_users,
    )


def positives_of(workload: Workload) -> list[Rows]:
    """What was recorded: by device the item rows of its interactions, which have weight 1."""
    parts = map(workload.part, range(workload.devices))
    return [workload.positive[part][workload.weight[part] == 1] for part in parts]


def result_of(simulation: Simulation) -> tuple[Floats, Floats]:
    """The items, float32 [items, k], and all devices' users, float32 [devices, k] or empty."""
    items = simulation.method.model_arrays["items"]
    users = [learner.state()["users"] for learner in simulation.learners]
    return items, np.concatenate(users)


class _Recorder(DirectChannel):
    """Both a device's step, which sees its batch, and its channel, which sees whose rows it has."""

    def __init__(self) -> None:
        self._step = NumpyStep()
        self._batch: FactorBatch | None = None
        self.batches: list[FactorBatch] = []
        """Of the round's devices, in order; items are rows of the catalogue."""
        self.first_users: list[NDArray[np.float32]] = []

    def gradients(self, users: Floats, items: Floats, batch: FactorBatch) -> FactorGradients:
        self._batch = batch
        if len(self.first_users) == len(self.batches):
            self.first_users.append(users.copy())
        return self._step.gradients(users, items, batch)

    def up(self, update: Update) -> Update:
        rows, batch = update.tensors["rows"], self._batch
        if batch is not None:
            positive, negative = rows[batch.positive], rows[batch.negative]
            self.batches.append(replace(batch, positive=positive, negative=negative))
            self._batch = None
        return update
