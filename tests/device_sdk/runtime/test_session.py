"""Choosing execution providers, and the binding path of providers with memory of their own."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from device_sdk import ProviderError, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.onnx_reader import OnnxModel, read_onnx
from device_sdk.runtime import batch as batch_memory
from device_sdk.runtime.batch import BatchMemory
from device_sdk.runtime.providers import (
    CPU,
    CUDA,
    KNOWN,
    WEBGPU,
    Provider,
    add_to,
    candidates,
    left_to_the_cpu,
)
from device_sdk.runtime.session import Calls, open_session
from device_sdk.runtime.step import StepRunner
from device_sdk.world import PROVIDER_NAMES, TrainingOptions
from tests.fakes.handmade import factor_artifact, linear_artifact


def test_candidates() -> None:
    assert candidates("cpu") == candidates([CPU.title]) == (CPU,)
    assert candidates("auto")[-1] is CPU
    for asked, told in (
        ([], "an empty list"),
        (None, "is None; expected"),
        (["cpu", 3], "3.; expected"),
        ("gpu", "is unknown"),
        (["cpu", "gpu"], "is unknown"),
        (Provider("mine", "MineExecutionProvider"), "not MineExecutionProvider"),
        (Provider("mine", "MineExecutionProvider", package="mine_ep"), "pip install mine-ep"),
        (Provider("mine", "MineExecutionProvider", library="/no/such.so"), "cannot be loaded"),
    ):
        with pytest.raises(ProviderError, match=told):
            candidates(asked)


def test_what_is_not_there_of_a_list_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    missing = Provider("mine", "MineExecutionProvider", package="mine_ep")
    assert candidates([missing, "cpu"]) == (CPU,)
    assert "mine cannot be used: it needs `pip install mine-ep`" in caplog.text
    with pytest.raises(ProviderError, match=r"pip install mine-ep.*providers=.cpu. works"):
        candidates([missing])


def _read(*nodes: onnx.NodeProto) -> OnnxModel:
    graph = onnx.helper.make_graph(nodes, "g", [], [])
    return read_onnx(onnx.helper.make_model(graph).SerializeToString())


def test_a_plugin_without_a_device_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_sdk.runtime.providers._installed", lambda package: True)
    monkeypatch.setattr("device_sdk.runtime.providers._registered", lambda provider: [])
    with pytest.raises(ProviderError, match=r"finds no device .*: it needs a driver .*libvulkan1"):
        candidates("webgpu")


def test_auto_says_which_plugin_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    providers = "device_sdk.runtime.providers."
    monkeypatch.setattr(providers + "_installed", lambda package: "webgpu" in package)
    monkeypatch.setattr(providers + "_registered", lambda provider: [])
    linear_artifact(tmp_path)
    trainer = Trainer(tmp_path)
    assert trainer.providers == (CPU.title,)
    assert trainer.provider_report.startswith("webgpu cannot be used: it finds no device")
    assert Trainer(tmp_path, providers="cpu").provider_report == ""


def test_nodes_that_webgpu_cannot_run_are_left_to_the_cpu_by_name() -> None:
    node = onnx.helper.make_node
    pieces = [f"p{place}" for place in range(8)]
    model = _read(
        node("Split", ["x"], pieces, name="many"),
        node("Split", ["x"], pieces[:7], name="few"),
        node("MaxPool", ["x"], ["y", "i"], name="indices", kernel_shape=[2]),
        node("MaxPool", ["x"], ["z"], kernel_shape=[2]),
        node("Clip", ["x", "", "x"], ["c"]),
    )
    assert left_to_the_cpu(model) == ["many", "indices"]
    with pytest.raises(ProviderError, match="Split with 8 outputs cannot run there"):
        left_to_the_cpu(_read(node("Split", ["x"], pieces)))


def test_a_graph_that_crashes_plugins_is_refused() -> None:
    node = onnx.helper.make_node
    model = _read(node("ConvTranspose", ["x", "w", ""], ["y"]), node("Neg", ["y"], ["z"]))
    with pytest.raises(ProviderError, match="export the artifact again"):
        add_to(ort.SessionOptions(), WEBGPU, model)


def test_names_are_the_same_everywhere() -> None:
    assert {"auto", *(provider.name for provider in KNOWN)} == set(PROVIDER_NAMES)
    with pytest.raises(ValueError, match="providers is 'gpu'"):
        TrainingOptions(providers="gpu")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_is_offered_but_fails_gives_way_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if CUDA.title in ort.get_available_providers():
        pytest.skip("CUDA works here")
    linear_artifact(tmp_path)
    graph = load_artifact(tmp_path).graphs["train"]
    # What a machine with the GPU wheel and without a GPU looks like.
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA.title, CPU.title])
    with caplog.at_level(logging.INFO, "device_sdk"):
        session, settings = open_session(graph, "train.onnx", "auto", 1, Calls())
    assert session.get_providers() == [CPU.title]
    assert settings.providers == (CPU.title,)
    assert "trying the next provider" in caplog.text
    assert caplog.text.count("runs on CPUExecutionProvider") == 1
    with pytest.raises(ProviderError, match="CUDAExecutionProvider"):
        open_session(graph, "train.onnx", "cuda", 1, Calls())


def test_the_choice_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    factor_artifact(tmp_path)
    with caplog.at_level(logging.INFO, "device_sdk"):
        trainer = Trainer(tmp_path, threads=2)
        trainer.predict({})
    assert caplog.text.count("runs on") == 1
    assert caplog.text.count("runs with 1 thread") == 1


def test_binding_at_every_step_gives_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a device with its own memory, on the CPU, where it must change nothing."""
    linear_artifact(tmp_path)
    plain, rebinding = Trainer(tmp_path), Trainer(tmp_path)
    calls = []
    bind = StepRunner._bind_inputs

    def counted(runner: StepRunner, binding: ort.IOBinding, memory: BatchMemory, bank: int) -> None:
        calls.append(bank)
        bind(runner, binding, memory, bank)

    monkeypatch.setattr(StepRunner, "_bind_inputs", counted)
    monkeypatch.setattr(rebinding._runner, "_host_only", False)
    rng = np.random.default_rng(0)
    for rows in (4, 4, 2, 4):
        batch = {
            "x": rng.normal(size=(rows, 4)).astype(np.float32),
            "y": rng.normal(size=(rows, 3)).astype(np.float32),
        }
        assert plain.step(batch) == rebinding.step(batch)
    assert calls == [0, 1, 0, 1]
    for name, array in plain.state.items():
        assert np.array_equal(rebinding.state[name], array)


@pytest.mark.parametrize("host_only", [True, False])
def test_large_entries_read_in_place_give_what_copies_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_only: bool
) -> None:
    linear_artifact(tmp_path)
    copying, in_place = Trainer(tmp_path), Trainer(tmp_path)
    for trainer in (copying, in_place):
        monkeypatch.setattr(trainer._runner, "_host_only", host_only)
    rng = np.random.default_rng(0)
    large = {name: rng.normal(size=(9, n)).astype(np.float32) for name, n in (("x", 4), ("y", 3))}
    small = {name: array[:2] for name, array in large.items()}
    strided = {name: np.asfortranarray(array) for name, array in large.items()}
    fixed = {name: array.copy() for name, array in large.items()}
    for array in fixed.values():
        array.flags.writeable = False

    def step(batch: dict[str, np.ndarray]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batch_memory, "_LARGE_BYTES", 100)
            found = in_place.step(batch)
        assert copying.step(batch) == found

    for batch in (large, small, strided, fixed, large, small):
        step(batch)
        # The next step must see what the array holds then.
        large["x"] += 1
    for _ in range(4):
        step({name: array + 1 for name, array in large.items()})
    for name, array in copying.state.items():
        assert np.array_equal(in_place.state[name], array)


def test_what_is_large_is_not_copied(tmp_path: Path) -> None:
    linear_artifact(tmp_path)
    trainer = Trainer(tmp_path)
    x, y = np.ones((1 << 16, 4), np.float32), np.ones((1 << 16, 3), np.float32)
    trainer.step({"x": x, "y": y})
    memory = trainer._runner._memory
    assert [entry.in_place for entry in memory.inputs] == [True, True]
    assert np.shares_memory(memory.inputs[0].value.numpy(), x)
