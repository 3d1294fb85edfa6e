"""Rounds of Tessera's simulation: ``python -m benchmarks.peers.tessera_rounds WORKLOAD HOW``.

Its devices draw the workload's triples themselves, from the workload's seed, and within the time
that is measured; in the first round they also prepare them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from benchmarks.peers.record import positives_of, result_of, simulation_of
from benchmarks.peers.turns import take_turns
from benchmarks.peers.workload import Floats, Workload
from benchmarks.simulator import Simulation
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.train.scatter import factor_step
from device_sdk.trainer import Trainer


def _one_by_one(step: FactorStep, workload: Workload) -> Simulation:
    shape = workload.items.shape
    return simulation_of(positives_of(workload), *shape, workload.seed, step)


def _alone(workload: Workload) -> Simulation:
    """Each device computes its own step as the product's devices do: with one user, in NumPy."""
    return _one_by_one(factor_step(packaged_artifact()), workload)


def _graph(workload: Workload) -> Simulation:
    """Each device computes its own step with the train graph."""
    trainer = Trainer(packaged_artifact(), providers="cpu", threads=1)
    return _one_by_one(TrainerStep(trainer), workload)


_SIMULATIONS: dict[str, Callable[[Workload], Simulation]] = {"alone": _alone, "graph": _graph}


class TesseraRounds:
    """See :class:`~benchmarks.peers.turns.Framework`."""

    def __init__(self, workload: Workload, simulation: str) -> None:
        self._simulation = _SIMULATIONS[simulation](workload)

    @property
    def items(self) -> Floats:
        return result_of(self._simulation)[0]

    @property
    def users(self) -> Floats:
        return result_of(self._simulation)[1]

    def prepare(self, number: int) -> None:
        """Nothing: the devices draw their triples themselves."""

    def round(self, number: int) -> None:
        self._simulation.round()


if __name__ == "__main__":
    take_turns(("numpy",), partial(TesseraRounds, simulation=sys.argv[2]))
