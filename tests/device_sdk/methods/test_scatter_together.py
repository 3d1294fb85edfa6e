"""Scatter's devices in one call, against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter import learner as scatter
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.factor_step import (
    FactorStep,
    NumpyStep,
    StepByUsers,
    TrainerStep,
)
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.publish.report import Reason

ITEMS, K = 30, 6


@pytest.fixture(scope="module")
def graph() -> TrainerStep:
    return TrainerStep(Trainer(packaged_artifact(), providers="cpu", threads=1))


@dataclass
class Liked:
    """By user the liked items; one outside of the catalogue makes the device fail."""

    rows: list[np.ndarray]

    def positives(self) -> list[np.ndarray]:
        return self.rows


liked = st.one_of(
    st.just([]),
    st.just(list(range(ITEMS))),
    st.lists(st.integers(0, ITEMS - 1), unique=True, max_size=12),
)
users = st.one_of(st.lists(liked, min_size=1, max_size=1), st.lists(liked, max_size=3))
devices = st.lists(
    st.tuples(users, st.integers(1, K + 1), st.sampled_from(["", "", "", "outside", "diverged"])),
    min_size=1,
    max_size=9,
)


def fleet(given_devices: Sequence, step: FactorStep, pool: PoolSettings) -> list[ScatterLearner]:  # type: ignore[type-arg]
    learners = []
    for place, (positives, columns, fault) in enumerate(given_devices):
        rows = [np.asarray(user, dtype=np.int64) for user in positives]
        if fault == "outside":
            rows.append(np.array([ITEMS], dtype=np.int64))
        rng = np.random.default_rng(place)
        learner = ScatterLearner(Liked(rows), step, columns, rng, pool)
        if fault == "diverged":
            state = learner.state()
            learner.restore({**state, "users": np.full((len(rows), K), 3e38, np.float32)})
        learners.append(learner)
    return learners


def alone(learners: Sequence[ScatterLearner], broadcast: Broadcast) -> list[Update | LearnerError]:
    found: list[Update | LearnerError] = []
    for learner in learners:
        try:
            found.append(learner.train(broadcast))
        except LearnerError as error:
            found.append(error)
    return found


def bits(found: Update | LearnerError) -> object:
    if isinstance(found, LearnerError):
        return str(found), found.reason
    return {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in found.tensors.items()
    }


def require_close(
    found: Sequence[Update | LearnerError], expected: Sequence[Update | LearnerError]
) -> None:
    """The same draws and errors; sums as onnxruntime orders them, which shapes may change."""
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, LearnerError) or isinstance(other, LearnerError):
            assert bits(one) == bits(other)
            continue
        for name in ("columns", "rows"):
            assert np.array_equal(one.tensors[name], other.tensors[name])
        values, theirs = one.tensors["values"], other.tensors["values"]
        np.testing.assert_allclose(values, theirs, rtol=1e-4, atol=1e-5)


def state_bits(learner: ScatterLearner) -> dict[str, tuple[object, bytes]]:
    return {name: (array.shape, array.tobytes()) for name, array in learner.state().items()}


@settings(max_examples=150, deadline=None)
@given(
    given_devices=devices,
    kind=st.sampled_from(["numpy", "graph", "by users"]),
    pool=st.sampled_from(
        [PoolSettings(0.0), PoolSettings(), PoolSettings(2.0, 1.0), PoolSettings(0.5, 0.1, 3.0)]
    ),
    training=st.builds(
        BprTraining,
        scores=st.sampled_from(["residual", "columns"]),
        most_triples=st.sampled_from([0, 5]),
        item_l2=st.sampled_from([0.0, 0.05]),
    ),
    half=st.booleans(),
    broken_row=st.sampled_from([None, None, 3]),
    together_bytes=st.sampled_from([1, 3_000, scatter._TOGETHER_BYTES]),
)
def test_what_a_device_computes_is_its_own(
    graph: TrainerStep,
    given_devices: Sequence,  # type: ignore[type-arg]
    kind: str,
    pool: PoolSettings,
    training: BprTraining,
    half: bool,
    broken_row: int | None,
    together_bytes: int,
) -> None:
    step: FactorStep = {
        "numpy": NumpyStep(),
        "graph": graph,
        "by users": StepByUsers(lambda: graph),
    }[kind]
    ones, others = (fleet(given_devices, step, pool) for _ in range(2))
    items = np.random.default_rng(7).standard_normal((ITEMS, K)).astype(np.float32)
    if broken_row is not None:
        items[broken_row] = np.inf
    tensors = {"items": items.astype(np.float16) if half else items}
    for round_id in (1, 2):
        broadcast = Broadcast(round_id, 0, tensors, training.as_scalars())
        before = [state_bits(learner) for learner in others]
        expected = alone(ones, broadcast)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scatter, "_TOGETHER_BYTES", together_bytes)
            found = ScatterLearner.train_many(others, broadcast)
        if kind == "numpy":
            assert [bits(one) for one in found] == [bits(one) for one in expected]
            assert [state_bits(one) for one in others] == [state_bits(one) for one in ones]
        else:
            require_close(found, expected)
        for one, learner, was in zip(found, others, before, strict=True):
            assert isinstance(one, Update) or state_bits(learner) == was


def test_a_device_that_fails_leaves_the_others_alone() -> None:
    given_devices = [([[place, place + 1]], 4, "") for place in range(8)]
    given_devices[2] = ([[1, 5]], 4, "outside")
    given_devices[5] = ([[1, 5]], 4, "diverged")
    learners = fleet(given_devices, NumpyStep(), PoolSettings())
    items = np.random.default_rng(7).standard_normal((ITEMS, K)).astype(np.float32)
    broadcast = Broadcast(1, 0, {"items": items}, BprTraining().as_scalars())
    found = ScatterLearner.train_many(learners, broadcast)
    reasons = {
        place: one.reason for place, one in enumerate(found) if isinstance(one, LearnerError)
    }
    assert reasons == {2: Reason.DOES_NOT_FIT, 5: Reason.NOT_FINITE}


def test_a_broadcast_that_fits_nobody_is_everybodys_error() -> None:
    learners = fleet([([[1]], 4, ""), ([[2]], 2, "")], NumpyStep(), PoolSettings())
    for broadcast in (
        Broadcast(1, 0, {}, BprTraining().as_scalars()),
        Broadcast(1, 0, {"items": np.zeros((ITEMS, K), np.float32)}, {}),
    ):
        before = [state_bits(one) for one in learners]
        found = ScatterLearner.train_many(learners, broadcast)
        assert [state_bits(one) for one in learners] == before
        assert [str(one) for one in found] == [str(one) for one in alone(learners, broadcast)]
        assert all(isinstance(one, LearnerError) for one in found)


def test_devices_of_equal_k_take_one_step(graph: TrainerStep) -> None:
    class Counted:
        def __init__(self) -> None:
            self.devices: list[int] = []

        def gradients(self, users, items, batch):  # type: ignore[no-untyped-def]
            self.devices.append(len(batch.blocks))
            return graph.gradients(users, items, batch)

    step = Counted()
    given_devices = [([[place, place + 1]], 4 if place % 2 else 2, "") for place in range(9)]
    learners = fleet(given_devices, step, PoolSettings())
    items = np.random.default_rng(7).standard_normal((ITEMS, K)).astype(np.float32)
    ScatterLearner.train_many(
        learners, Broadcast(1, 0, {"items": items}, BprTraining().as_scalars())
    )
    assert sorted(step.devices) == [4, 5]
