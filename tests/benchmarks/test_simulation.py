from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.scatter import ScatterMethod, initial_items
from benchmarks.channels import HalfChannel
from benchmarks.simulation import Simulation, mixed_columns, scatter_fleet
from device_sdk.methods.learner import Learner, LearnerError
from device_sdk.wire.arrays.exchange import Broadcast, Update
from tests.fakes.reference_step import ReferenceStep

ITEMS, DEVICES = 30, 12


def simulation(seed: int) -> Simulation:
    root = np.random.SeedSequence(seed)
    data, start, cohorts, fleet = root.spawn(4)
    rng = np.random.default_rng(data)
    positives = [[rng.choice(ITEMS, size=4, replace=False)] for _ in range(DEVICES)]
    columns = mixed_columns(DEVICES, (2, 8), rng)
    learners = scatter_fleet(positives, columns, ReferenceStep(), fleet)
    method = ScatterMethod(initial_items(ITEMS, 8, 0.1, np.random.default_rng(start)))
    return Simulation(method, learners, np.random.default_rng(cohorts))


def items_after(seed: int) -> bytes:
    run = simulation(seed)
    for _ in range(3):
        assert sum(summary.participants for summary in run.epoch(cohort=5)) == DEVICES
    assert isinstance(run.method, ScatterMethod)
    return run.method.items.tobytes()


def test_a_seed_repeats_a_run_bit_for_bit() -> None:
    assert items_after(4) == items_after(4)
    assert items_after(4) != items_after(5)


def test_an_epoch_is_rounds_of_a_cohort() -> None:
    run = simulation(1)
    assert [summary.participants for summary in run.epoch(cohort=5)] == [5, 5, 2]
    assert run.rounds == 3
    with pytest.raises(ValueError, match="cohort"):
        next(run.epoch(cohort=0))


class Broken(Learner):
    def train(self, broadcast: Broadcast) -> Update:
        raise LearnerError("broken")


class Foreign(Learner):
    """Uploads for another round."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def train(self, broadcast: Broadcast) -> Update:
        return replace(self._inner.train(broadcast), round_id=99)  # type: ignore[attr-defined]


class Diverged(Foreign):
    """Uploads for this round what no codec holds."""

    def train(self, broadcast: Broadcast) -> Update:
        found = super().train(broadcast)
        tensors = {
            name: array * np.float32(1e20) if array.dtype == np.float32 else array
            for name, array in found.tensors.items()
        }
        return replace(found, round_id=broadcast.round_id, tensors=tensors)


def test_one_device_failing_stops_nothing() -> None:
    run = simulation(1)
    run.learners = [Broken(), Foreign(run.learners[1]), *run.learners[2:]]  # type: ignore[list-item]
    assert run.round().participants == DEVICES - 2
    assert run.failures == {"learner": 1, "bad-round": 1}


def test_a_device_whose_update_no_codec_holds_stops_nothing() -> None:
    fleet = simulation(1)
    learners = [Diverged(fleet.learners[0]), *fleet.learners[1:]]
    channel = HalfChannel(DEVICES)
    run = Simulation(fleet.method, learners, np.random.default_rng(0), channel)  # type: ignore[arg-type]
    assert run.round().participants == DEVICES - 1
    assert run.failures == {"learner": 1}


def test_capacity_classes_have_equal_shares() -> None:
    dealt = mixed_columns(10, (8, 16, 32, 64), np.random.default_rng(0))
    assert sorted(np.unique(dealt, return_counts=True)[1].tolist()) == [2, 2, 3, 3]
