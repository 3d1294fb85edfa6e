"""What the Trainer refuses, and that it says what it expects instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_sdk import ArtifactError, BatchError, ProviderError, StateError, Trainer
from device_sdk.artifact.manifest import INITIAL_FILE
from tests.fakes.handmade import factor_artifact, factor_parts, linear_artifact, write_artifact

X, Y = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("linear")
    linear_artifact(folder)
    return Trainer(folder)


@pytest.fixture(scope="module")
def factors(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("factors")
    factor_artifact(folder)
    return Trainer(folder)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X}, "entry 'y' is missing"),
        ({"x": X, "y": Y, "z": Y}, "entry 'z' is unknown"),
        (
            {"x": X.astype(np.float64), "y": Y},
            r"'x' is float64, expected float32.*astype\(np.float32",
        ),
        ({"x": X.astype(">f4"), "y": Y}, "'x' is >f4, expected float32"),
        ({"x": X.tolist(), "y": Y}, "'x' is of type list, not a numpy array"),
        ({"x": X[0], "y": Y}, "1 axes instead of 2"),
        ({"x": X[:, :3], "y": Y}, "axis 1 must have length 4"),
        ({"x": X, "y": Y[:1]}, "axis 'batch' has length 2 in entry 'x'"),
        ({"x": X[:0], "y": Y[:0]}, "axis 0 is empty"),
        ([X, Y], "not a mapping"),
    ],
)
def test_wrong_batches(linear: Trainer, batch: Any, message: str) -> None:
    before = linear.state
    with pytest.raises(BatchError, match=message) as caught:
        linear.step(batch)
    assert "{x: float32[batch, 4], y: float32[batch, 3]}" in str(caught.value)
    assert all(np.array_equal(linear.state[name], array) for name, array in before.items())


def test_integers_are_not_widened_silently(factors: Trainer) -> None:
    index = np.zeros(3, np.int32)
    with pytest.raises(BatchError, match=r"'user' is int32, expected int64.*astype\(np.int64\)"):
        factors.step({"user": index, "item": index, "rating": np.ones(3, np.float32)})


def test_predict_takes_the_training_batch_but_no_unknown_entry(linear: Trainer) -> None:
    assert linear.predict({"x": X, "y": Y})["prediction"].shape == (2, 3)
    with pytest.raises(BatchError, match="entry 'z' is unknown"):
        linear.predict({"x": X, "z": Y})
    with pytest.raises(BatchError, match="expected float32"):
        linear.predict({"x": X.astype(np.float16)})
    with pytest.raises(BatchError, match="axis 0 is empty"):
        linear.predict({"x": X[:0]})


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"rate": 0.1}, "'rate' is unknown.*lr"),
        ({"lr": float("nan")}, "'lr' is nan"),
        ({"lr": 1e39}, "expected a finite float32 number"),
        ({"lr": "fast"}, "'lr' is 'fast'"),
    ],
)
def test_wrong_hyper_parameters(linear: Trainer, hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        linear.step({"x": X, "y": Y}, hyper=hyper)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"items.wait": np.ones((6, 2), np.float32)}, "'items.wait' is no parameter.*items.weight"),
        ({"items.weight": np.ones((6, 2))}, "is float64, expected float32"),
        ({"items.weight": np.ones(6, np.float32)}, "has 1 axes, expected 2"),
        ({"items.weight": [[1.0]]}, "is of type list"),
        ({"items.weight": np.ones((0, 2), np.float32)}, "no empty axis"),
        ({"items.weight": np.ones((7, 2), np.float32)}, "axis 'items'.*'b'.*same call"),
        (
            {"items.weight": np.ones((7, 2), np.float32), "items.bias": np.ones(6, np.float32)},
            "tensors that share an axis must agree",
        ),
    ],
)
def test_wrong_parameters_change_nothing(
    factors: Trainer, values: dict[str, Any], message: str
) -> None:
    before = factors.state
    with pytest.raises(StateError, match=message):
        factors.set_parameters(values)
    assert all(np.array_equal(factors.state[name], array) for name, array in before.items())


def test_wrong_state(linear: Trainer) -> None:
    with pytest.raises(StateError, match="'pack' is no state tensor"):
        linear.set_state({"pack": X})
    with pytest.raises(StateError, match=r"expected \[15\]"):
        linear.set_state({"packed": np.ones(14, np.float32)})
    with pytest.raises(StateError, match="step counts finished steps"):
        linear.set_state({"step": np.array(-1)})


def test_parameters_inside_a_pack_are_set_one_by_one(linear: Trainer) -> None:
    linear.reset()
    before = linear.state
    linear.set_parameters({"linear.bias": np.full(3, 9, np.float32)})
    assert np.array_equal(linear.parameters["linear.bias"], np.full(3, 9))
    assert np.array_equal(linear.state["packed"][:12], before["packed"][:12])
    linear.set_parameters({"mean": np.full(4, 2, np.float32)})
    assert np.array_equal(linear.buffers["mean"], np.full(4, 2))


def test_copies_are_copies(linear: Trainer) -> None:
    linear.reset()
    for copies in (linear.parameters, linear.buffers, linear.state):
        for array in copies.values():
            array[...] = 77
    for array in (*linear.parameters.values(), *linear.buffers.values()):
        assert not (array == 77).any()
    given = np.ones(3, np.float32)
    linear.set_parameters({"linear.bias": given})
    given[...] = 5
    assert np.array_equal(linear.parameters["linear.bias"], np.ones(3))


def test_wrong_providers_threads_and_seeds(tmp_path: Path) -> None:
    linear_artifact(tmp_path)
    with pytest.raises(ProviderError, match="'gpu' is unknown"):
        Trainer(tmp_path, providers="gpu")
    with pytest.raises(ProviderError, match="'NoSuchExecutionProvider' is unknown"):
        Trainer(tmp_path, providers=["NoSuchExecutionProvider"])
    with pytest.raises(ValueError, match="threads"):
        Trainer(tmp_path, threads=0)
    with pytest.raises(TypeError, match="seed"):
        Trainer(tmp_path, seed=1.5)  # type: ignore[arg-type]
    assert Trainer(tmp_path, providers=["CPUExecutionProvider"]).providers == (
        "CPUExecutionProvider",
    )


def test_an_artifact_without_inference_graph_trains_but_does_not_predict(tmp_path: Path) -> None:
    manifest, files = factor_parts()
    graphs = {"train": manifest.graphs["train"]}
    train = replace(manifest, name="train-only", graphs=graphs)
    write_artifact(tmp_path, train, {name: files[name] for name in ("train.onnx", INITIAL_FILE)})
    trainer = Trainer(tmp_path)
    index = np.zeros(2, np.int64)
    trainer.step({"user": index, "item": index, "rating": np.ones(2, np.float32)})
    with pytest.raises(ArtifactError, match="no inference graph"):
        trainer.predict({})
