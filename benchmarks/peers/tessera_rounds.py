"""Rounds of Tessera's simulation: ``python -m benchmarks.peers.tessera_rounds WORKLOAD STEP [N]``.

Its devices draw the workload's triples themselves, from the workload's seed, and within the time
that is measured; in the first round they also prepare them.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.peers.record import Fleet, positives_of
from benchmarks.peers.turns import take_turns
from benchmarks.peers.workload import Floats, Workload
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.train.scatter import factor_step
from device_sdk.trainer import Trainer


def _numpy() -> FactorStep:
    """As the product's devices do: with one user, in NumPy."""
    return factor_step(packaged_artifact())


def _graph() -> FactorStep:
    """By the train graph."""
    return TrainerStep(Trainer(packaged_artifact(), providers="cpu", threads=1))


_STEPS = {"numpy": _numpy, "graph": _graph}


class AloneRounds:
    """See :class:`~benchmarks.peers.turns.Framework`: one device after another, or as many as
    ``together`` in one call."""

    def __init__(self, workload: Workload, step: str, together: int = 1) -> None:
        self._together = together
        shape = workload.items.shape
        self._fleet = Fleet(positives_of(workload), *shape, workload.seed, _STEPS[step]())

    @property
    def items(self) -> Floats:
        return self._fleet.method.items

    @property
    def users(self) -> Floats:
        return self._fleet.users

    def prepare(self, number: int) -> None:
        """Nothing: the devices draw their triples themselves."""

    def round(self, number: int) -> None:
        for _ in self._fleet.round(number + 1, self._together):
            pass


if __name__ == "__main__":
    together = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    take_turns(("numpy", "onnxruntime"), partial(AloneRounds, step=sys.argv[2], together=together))
