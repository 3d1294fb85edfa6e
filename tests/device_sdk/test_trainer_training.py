"""The Trainer against NumPy: losses, state, shapes that change, steps that go wrong."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import device_sdk.trainer
from device_sdk import ArtifactError, GraphRunError, NonFiniteStep, Trainer
from device_sdk.artifact.manifest import INITIAL_FILE
from device_sdk.artifact.safetensors import Array
from device_sdk.runtime.step import step_seed
from tests.fakes.handmade import FEATURES, TARGETS, factor_artifact, linear_artifact


class LinearOracle:
    """The linear artifact's train step in float64."""

    def __init__(self, trainer: Trainer) -> None:
        self.w = trainer.parameters["linear.weight"].astype(np.float64)
        self.b = trainer.parameters["linear.bias"].astype(np.float64)
        self.mean = trainer.buffers["mean"].astype(np.float64)
        self.mw, self.mb = np.zeros_like(self.w), np.zeros_like(self.b)

    def step(self, batch: dict[str, Array], lr: float) -> float:
        error = batch["x"] @ self.w + self.b - batch["y"]
        scaled = 2 * error / error.size
        self.mw = 0.9 * self.mw + batch["x"].T @ scaled
        self.mb = 0.9 * self.mb + scaled.sum(0)
        self.w, self.b = self.w - lr * self.mw, self.b - lr * self.mb
        self.mean = 0.9 * self.mean + 0.1 * batch["x"].mean(0)
        return float((error**2).mean())


def linear_batch(rng: np.random.Generator, rows: int) -> dict[str, Array]:
    return {
        "x": rng.normal(size=(rows, FEATURES)).astype(np.float32),
        "y": rng.normal(size=(rows, TARGETS)).astype(np.float32),
    }


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    linear_artifact(tmp_path / "linear")
    return tmp_path / "linear"


@pytest.fixture
def factors(tmp_path: Path) -> Path:
    factor_artifact(tmp_path / "factors")
    return tmp_path / "factors"


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_match_numpy_while_batch_shapes_change(linear: Path, threads: int) -> None:
    trainer, rng = Trainer(linear, threads=threads), np.random.default_rng(0)
    oracle = LinearOracle(trainer)
    for step, rows in enumerate([8, 8, 3, 8, 1, 300, 3, 8, 2, 4, 5, 6, 7, 9, 10, 8, 3]):
        batch, lr = linear_batch(rng, rows), 0.05 + 0.01 * (step % 3)
        assert trainer.step(batch, hyper={"lr": lr}) == pytest.approx(
            oracle.step(batch, lr), rel=1e-5
        )
        assert trainer.step_count == step + 1
        assert trainer.state["step"] == step + 1
    assert trainer.threads == threads
    np.testing.assert_allclose(trainer.parameters["linear.weight"], oracle.w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trainer.parameters["linear.bias"], oracle.b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trainer.buffers["mean"], oracle.mean, rtol=1e-4, atol=1e-6)


def test_default_learning_rate_applies_to_each_step_apart(linear: Path) -> None:
    trainer, rng = Trainer(linear), np.random.default_rng(0)
    oracle, batch = LinearOracle(trainer), linear_batch(rng, 8)
    assert trainer.hyper == {"lr": 0.125}
    for lr in (None, 0.5, None):
        trainer.step(batch, hyper=None if lr is None else {"lr": lr})
        oracle.step(batch, 0.125 if lr is None else lr)
    np.testing.assert_allclose(trainer.parameters["linear.bias"], oracle.b, rtol=1e-5)


def test_batches_need_not_be_contiguous_and_are_copied(linear: Path) -> None:
    plain, strided = Trainer(linear), Trainer(linear)
    rng = np.random.default_rng(0)
    batch = linear_batch(rng, 6)
    odd = {
        "x": np.asfortranarray(batch["x"]),
        "y": np.repeat(batch["y"], 2, axis=0)[::2],
    }
    assert not odd["x"].flags.c_contiguous
    assert plain.step(batch) == strided.step(odd)
    assert np.array_equal(plain.predict(batch)["prediction"], strided.predict(odd)["prediction"])
    for array in odd.values():
        array[...] = np.nan
    assert plain.step(batch) == strided.step(batch)


def test_outputs_are_copies_of_the_last_finished_step(linear: Path) -> None:
    trainer, rng = Trainer(linear), np.random.default_rng(0)
    assert trainer.outputs == {}
    first, second = linear_batch(rng, 4), linear_batch(rng, 4)
    before = trainer.predict(first)["prediction"]
    trainer.step(first)
    outputs = trainer.outputs
    np.testing.assert_allclose(outputs["prediction"], before, rtol=1e-6)
    kept = outputs["prediction"].copy()
    for batch in (second, second, second):
        trainer.step(batch)
    assert np.array_equal(outputs["prediction"], kept)
    outputs["prediction"][...] = 0
    assert trainer.outputs["prediction"].any()


def test_a_dropped_step_leaves_everything_as_it_was(linear: Path) -> None:
    trainer, rng = Trainer(linear), np.random.default_rng(0)
    twin = Trainer(linear)
    good = [linear_batch(rng, 4) for _ in range(4)]
    bad = linear_batch(rng, 4)
    bad["x"][1, 1] = np.nan
    for batch in good[:3]:
        trainer.step(batch)
        twin.step(batch)
    state, outputs = trainer.state, trainer.outputs
    for _ in range(3):
        with pytest.raises(NonFiniteStep, match="not finite"):
            trainer.step(bad)
        for name, array in state.items():
            assert np.array_equal(trainer.state[name], array), name
        assert np.array_equal(trainer.outputs["prediction"], outputs["prediction"])
        assert trainer.step_count == 3
    assert trainer.step(good[3]) == twin.step(good[3])
    for name, array in twin.state.items():
        assert np.array_equal(trainer.state[name], array), name


def test_a_finite_loss_with_infinite_new_state_is_dropped(linear: Path) -> None:
    trainer, rng = Trainer(linear), np.random.default_rng(0)
    before = trainer.parameters
    with pytest.raises(NonFiniteStep) as caught:
        trainer.step({k: 1e18 * v for k, v in linear_batch(rng, 4).items()}, hyper={"lr": 3e38})
    assert np.isfinite(caught.value.loss)
    assert not np.isfinite(caught.value.guard)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert np.array_equal(trainer.parameters["linear.bias"], before["linear.bias"])


def test_the_graph_gets_the_seed_of_its_step(linear: Path) -> None:
    trainer, rng = Trainer(linear, seed=5), np.random.default_rng(0)
    seen = []
    for step in range(4):
        trainer.step(linear_batch(rng, 2))
        seen.append(int(trainer.outputs["seed"]))
        assert seen[-1] == step_seed(5, step)
    assert len(set(seen)) == 4
    assert all(0 <= seed < 2**31 for seed in seen)
    assert step_seed(5, 0) != step_seed(6, 0)


def test_predict_between_steps_changes_nothing(linear: Path) -> None:
    alone, mixed = Trainer(linear), Trainer(linear)
    rng = np.random.default_rng(0)
    for rows in (4, 7, 4, 2):
        batch = linear_batch(rng, rows)
        assert alone.step(batch) == mixed.step(batch)
        p = mixed.parameters
        expected = batch["x"] @ p["linear.weight"] + p["linear.bias"]
        found = mixed.predict({"x": batch["x"]})
        np.testing.assert_allclose(found["prediction"], expected, rtol=1e-5, atol=1e-6)
        # An output that the graph passes through unchanged must not be the state's own memory.
        found["packed"][...] = np.nan
        assert np.isfinite(mixed.parameters["linear.bias"]).all()


def factor_oracle(state: dict[str, Array], batch: dict[str, Array], lr: float) -> dict[str, Array]:
    v, b, u = (state[name].astype(np.float64) for name in ("V", "b", "U"))
    i, j = batch["user"], batch["item"]
    g = 2 * ((u[i] * v[j]).sum(1) + b[j] - batch["rating"]) / len(i)
    gv, gb, gu = np.zeros_like(v), np.zeros_like(b), np.zeros_like(u)
    np.add.at(gv, j, g[:, None] * u[i])
    np.add.at(gb, j, g)
    np.add.at(gu, i, g[:, None] * v[j])
    momentum = 0.5 * state["sgd.U"] + gu
    return {
        "V": v - lr * gv,
        "b": b - lr * gb,
        "U": u - lr * momentum,
        "sgd.U": momentum,
        "step": state["step"] + 1,
    }


def factor_batch(rng: np.random.Generator, rows: int, axes: dict[str, int]) -> dict[str, Array]:
    return {
        "user": rng.integers(0, axes["users"], rows),
        "item": rng.integers(0, axes["items"], rows),
        "rating": rng.normal(size=rows).astype(np.float32),
    }


def factor_values(rng: np.random.Generator, users: int, items: int, k: int) -> dict[str, Array]:
    return {
        "items.weight": rng.normal(size=(items, k)).astype(np.float32),
        "items.bias": rng.normal(size=items).astype(np.float32),
        "users.weight": rng.normal(size=(users, k)).astype(np.float32),
    }


def test_named_axes_change_back_and_forth(factors: Path) -> None:
    trainer, rng = Trainer(factors, threads=2), np.random.default_rng(0)
    assert trainer.threads == 1
    for users, items, k in [(3, 6, 2), (1, 40, 8), (5, 4, 1), (1, 40, 8), (2, 7, 3), (90, 300, 16)]:
        values = factor_values(rng, users, items, k)
        resized = trainer.axes["users"] != users or trainer.axes["k"] != k
        momentum = trainer.state["sgd.U"]
        trainer.set_parameters(values)
        assert trainer.axes == {"users": users, "items": items, "k": k}
        state = trainer.state
        assert np.array_equal(state["V"], values["items.weight"])
        assert np.array_equal(state["sgd.U"], np.zeros((users, k)) if resized else momentum)
        for rows in (5, 11):
            batch = factor_batch(rng, rows, trainer.axes)
            expected = factor_oracle(trainer.state, batch, 0.05)
            trainer.step(batch)
            for name, array in expected.items():
                np.testing.assert_allclose(trainer.state[name], array, rtol=1e-4, atol=1e-5)
            v, b, u = (values[n] for n in ("items.weight", "items.bias", "users.weight"))
            prediction = (u[batch["user"]] * v[batch["item"]]).sum(1) + b[batch["item"]]
            assert np.array_equal(trainer.outputs["hits"][0], np.flatnonzero(prediction > 0))
            values = trainer.parameters
        scores = trainer.predict({})["scores"]
        np.testing.assert_allclose(
            scores, values["users.weight"] @ values["items.weight"].T, rtol=1e-4, atol=1e-5
        )
    trainer.reset()
    assert trainer.axes == {"users": 3, "items": 6, "k": 2}
    assert trainer.step_count == 0
    for name, array in Trainer(factors).state.items():
        assert np.array_equal(trainer.state[name], array)


def test_an_index_out_of_range_is_reported_and_changes_nothing(factors: Path) -> None:
    trainer, rng = Trainer(factors), np.random.default_rng(0)
    trainer.step(factor_batch(rng, 5, trainer.axes))
    state, batch = trainer.state, factor_batch(rng, 5, trainer.axes)
    bad = {**batch, "item": np.full(5, 6)}
    with pytest.raises(GraphRunError, match="train step, which was dropped"):
        trainer.step(bad)
    for name, array in state.items():
        assert np.array_equal(trainer.state[name], array)
    expected = factor_oracle(state, batch, 0.05)
    trainer.step(batch)
    np.testing.assert_allclose(trainer.state["V"], expected["V"], rtol=1e-5, atol=1e-6)


def test_a_large_model_s_initial_state_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held for `reset`, it would be a third copy of the parameters."""
    monkeypatch.setattr(device_sdk.trainer, "_LARGE_STATE_BYTES", 0)
    linear_artifact(tmp_path)
    trainer = Trainer(tmp_path)
    before = trainer.state
    trainer.step(linear_batch(np.random.default_rng(0), 5))
    trainer.reset()
    assert all(np.array_equal(trainer.state[name], array) for name, array in before.items())
    trainer.step(linear_batch(np.random.default_rng(0), 5))
    moved = trainer.state
    initial = tmp_path / INITIAL_FILE
    initial.write_bytes(initial.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="was changed"):
        trainer.reset()
    assert all(np.array_equal(trainer.state[name], array) for name, array in moved.items())
