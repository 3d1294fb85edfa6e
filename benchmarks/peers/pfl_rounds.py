"""Rounds in pfl's simulator, the devices' work in NumPy: ``pfl_rounds.py WORKLOAD dense|rows``.

``dense``: devices send the whole matrix, which pfl's own statistics and aggregator add up.
``rows``: they send the rows that they touched, and an aggregator of ours adds those up.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import numpy as np
from pfl.aggregate.base import SumAggregator
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import FederatedAlgorithm
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import AlgorithmHyperParams, ModelHyperParams
from pfl.metrics import Metrics
from pfl.model.base import Model
from pfl.stats import MappedVectorStatistics, TrainingStatistics

from benchmarks.peers.turns import take_turns
from benchmarks.peers.workload import Floats, Rows, Workload, device_step


class Factors(Model):
    """The item matrix."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.items = workload.items

    def apply_model_update(self, statistics):  # type: ignore[no-untyped-def]
        self.items = self._workload.server_step(self.items, statistics["items"])
        return self, Metrics()


class TouchedRows(TrainingStatistics):
    """The gradient of some rows."""

    def __init__(self, rows: Rows, values: Floats) -> None:
        self.rows, self.values = rows, values

    @property
    def num_parameters(self) -> int:
        return self.values.size

    def __add__(self, other):  # type: ignore[no-untyped-def]
        raise NotImplementedError("RowSums adds them")

    def __repr__(self) -> str:
        return f"TouchedRows({len(self.rows)})"

    def get_weights(self):  # type: ignore[no-untyped-def]
        raise NotImplementedError("one process has nobody to send them to")

    def from_weights(self, *of_another_process):  # type: ignore[no-untyped-def]
        raise NotImplementedError("one process has nobody to send them to")

    def apply_elementwise(self, f):  # type: ignore[no-untyped-def]
        return TouchedRows(self.rows, f(self.values))


class RowSums(SumAggregator):
    """Adds touched rows to one matrix."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def accumulate(self, *, accumulated, user_stats):  # type: ignore[no-untyped-def]
        if accumulated is None:
            accumulated = MappedVectorStatistics({"items": np.zeros(self._shape, np.float32)})
        accumulated["items"][user_stats.rows] += user_stats.values
        return accumulated


class Scatter(FederatedAlgorithm):
    """One step of each user on its triples."""

    def __init__(self, workload: Workload, *, dense: bool) -> None:
        super().__init__()
        self._workload = workload
        self._dense = dense
        self.users = InMemoryUserStateStorage()
        for device, user in enumerate(workload.users):
            self.users.save_state({"user": user}, str(device))

    def get_next_central_contexts(self, *arguments, **named):  # type: ignore[no-untyped-def]
        raise NotImplementedError("rounds are asked for one by one")

    def process_aggregated_statistics(  # type: ignore[no-untyped-def]
        self, central_context, aggregate_metrics, model, statistics
    ):
        return model.apply_model_update(statistics)

    def simulate_one_user(self, model, user_dataset, central_context):  # type: ignore[no-untyped-def]
        name = user_dataset.user_id
        work = self._workload
        moved, rows, gradient = device_step(
            model.items,
            self.users.load_state(name)["user"],
            user_dataset.raw_data,
            work.user_rates[int(name)],
            work.user_l2,
            work.item_l2,
        )
        self.users.save_state({"user": moved}, name)
        if not self._dense:
            return TouchedRows(rows, gradient), Metrics()
        whole = np.zeros_like(model.items)
        whole[rows] = gradient
        return MappedVectorStatistics({"items": whole}), Metrics()


class PflRounds:
    """See :class:`~turns.Framework`."""

    def __init__(self, workload: Workload, *, dense: bool) -> None:
        self._workload = workload
        self._dense = dense
        self._model = Factors(workload)
        self._algorithm = Scatter(workload, dense=dense)

    @property
    def items(self) -> Floats:
        return self._model.items

    @property
    def users(self) -> Floats:
        names = map(str, range(self._workload.devices))
        return np.stack([self._algorithm.users.load_state(name)["user"] for name in names])

    def prepare(self, number: int) -> None:
        work = self._workload
        parts = [work.part(device) for device in range(work.devices)]
        data = {
            str(device): (work.positive[part], work.negative[number][part], work.weight[part])
            for device, part in enumerate(parts)
        }
        sampler = get_user_sampler("minimize_reuse", list(data))
        users = FederatedDataset(lambda name: Dataset(data[name], user_id=name), sampler)
        aggregator = None if self._dense else RowSums(work.items.shape)
        self._backend = SimulatedBackend(users, users, aggregator=aggregator)

    def round(self, number: int) -> None:
        context = CentralContext(
            current_central_iteration=number,
            do_evaluation=False,
            cohort_size=self._workload.devices,
            population=Population.TRAIN,
            algorithm_params=AlgorithmHyperParams(),
            model_train_params=ModelHyperParams(),
        )
        found, metrics = self._backend.gather_results(
            self._model, self._algorithm, central_context=context
        )
        self._algorithm.process_aggregated_statistics(context, metrics, self._model, found)


if __name__ == "__main__":
    # pfl names what it finds missing: TensorFlow, torch, MLX.
    logging.disable(logging.WARNING)
    take_turns(("pfl", "numpy"), partial(PflRounds, dense=sys.argv[2] == "dense"))
