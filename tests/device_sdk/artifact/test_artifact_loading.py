"""Safe loading: a folder that was changed, or asks for what is not allowed, is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from device_sdk import Trainer
from device_sdk.artifact import ArtifactError, load_artifact, read_manifest
from device_sdk.artifact.manifest import INITIAL_FILE
from device_sdk.artifact.safetensors import decode, encode
from tests.fakes.child_environment import child_environment
from tests.fakes.handmade import factor_artifact, factor_parts, linear_parts, write_artifact
from tests.fakes.waiting import PATIENCE_SECONDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "artifact", *linear_parts())
    return tmp_path / "artifact"


def test_a_good_artifact_loads(folder: Path) -> None:
    artifact = load_artifact(folder)
    assert artifact.manifest == read_manifest(folder)
    assert list(artifact.initial) == ["linear.weight", "linear.bias", "mean"]
    assert not artifact.initial["mean"].flags.writeable
    assert artifact.graphs["train"].onnx == (folder / "train.onnx").read_bytes()
    assert artifact.graphs["train"].external == {}


def test_an_unlisted_file_is_ignored_but_a_listed_one_is_checked(tmp_path: Path) -> None:
    manifest, files = linear_parts()
    write_artifact(tmp_path, manifest, {**files, "LICENSE": b"free"})
    (tmp_path / "notes.txt").write_text("not part of the artifact")
    load_artifact(tmp_path)
    (tmp_path / "LICENSE").write_bytes(b"evil")
    with pytest.raises(ArtifactError, match="LICENSE was changed"):
        load_artifact(tmp_path)


@pytest.mark.parametrize("name", ["train.onnx", "infer.onnx", INITIAL_FILE])
def test_changed_files(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=f"{name} was changed"):
        load_artifact(folder)
    path.write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match=f"the manifest says {len(data)}"):
        load_artifact(folder)
    path.write_bytes(data + b"x")
    with pytest.raises(ArtifactError, match=f"expected at most {len(data)}"):
        load_artifact(folder)
    path.unlink()
    with pytest.raises(ArtifactError, match="does not exist"):
        load_artifact(folder)
    path.mkdir()
    with pytest.raises(ArtifactError, match=r"cannot be read|not a regular file"):
        load_artifact(folder)


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links and named pipes")
def test_links_and_pipes(folder: Path, tmp_path: Path) -> None:
    path, outside = folder / "train.onnx", tmp_path / "outside.onnx"
    os.replace(path, outside)
    path.symlink_to(outside)
    with pytest.raises(ArtifactError, match="link that leaves"):
        load_artifact(folder)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_artifact(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="not a regular file"):
        load_artifact(folder)
    path.unlink()
    # A link that stays inside is harmless; so is one to the folder as a whole.
    os.replace(outside, folder / "real.onnx")
    path.symlink_to("real.onnx")
    (tmp_path / "latest").symlink_to(folder)
    load_artifact(tmp_path / "latest")


def test_an_unknown_version_and_a_missing_folder(folder: Path, tmp_path: Path) -> None:
    value = json.loads((folder / "manifest.json").read_bytes())
    value["format_version"] = 2
    (folder / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match="format version 2 is unknown"):
        Trainer(folder)
    with pytest.raises(ArtifactError, match=r"is .* an artifact's folder"):
        Trainer(tmp_path / "nowhere")


def edited(tmp_path: Path, edit: Callable[[onnx.ModelProto], object]) -> Path:
    manifest, files = linear_parts()
    model = onnx.load_from_string(files["train.onnx"])
    edit(model)
    write_artifact(tmp_path, manifest, {**files, "train.onnx": model.SerializeToString()})
    return tmp_path


def _foreign_node(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Gelu", ["loss"], ["odd"], domain="com.microsoft"))


def _foreign_in_subgraph(model: onnx.ModelProto) -> None:
    inner = helper.make_graph(
        [helper.make_node("F", [], ["o"], domain="com.microsoft")], "i", [], []
    )
    model.graph.node.append(helper.make_node("If", ["c"], ["o"], then_branch=inner))


def _function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    opset = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("", "Sub", ["x"], ["y"], [node], opset))


def _external(location: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        model.graph.initializer.append(tensor)

    return edit


def _default(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((), np.float32), "hyper.lr")
    )


def _input_type(
    position: int,
    *,
    dtype: int | None = None,
    dims: Sequence[str | int | None] | None = None,
    unshaped: bool = False,
) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        kind = model.graph.input[position].type.tensor_type
        if dtype is not None:
            kind.elem_type = dtype
        if dims is not None:
            value = helper.make_tensor_value_info("x", kind.elem_type, dims)
            kind.shape.CopyFrom(value.type.tensor_type.shape)
        if unshaped:
            kind.ClearField("shape")

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_foreign_node, "com.microsoft.Gelu is not allowed"),
        (_foreign_in_subgraph, "com.microsoft.F is not allowed"),
        (_function, "functions must be inlined"),
        (_external("../../etc/passwd"), "'../../etc/passwd'.*not one of the artifact's files"),
        (_external("weights.bin"), "'weights.bin'.*not one of the artifact's files"),
        (_external(""), "not one of the artifact's files"),
        (_default, "'hyper.lr' has a default inside the graph"),
        (
            lambda m: m.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
            "imports opsets",
        ),
        (lambda m: setattr(m.opset_import[0], "version", 19), "manifest says 20"),
        (lambda m: setattr(m.graph.input[0], "name", "odd"), "no input 'state.packed'"),
        (lambda m: m.graph.input.append(m.graph.input[0]), "two inputs have the same name"),
        (
            lambda m: m.graph.output.append(
                helper.make_tensor_value_info("error", TensorProto.FLOAT, ["batch", 3])
            ),
            "an output 'error' that the manifest does not list",
        ),
        (lambda m: m.graph.output.pop(0), "no output 'loss'"),
        (_input_type(0, dtype=TensorProto.DOUBLE), "is float64, the manifest says float32"),
        (_input_type(0, dtype=TensorProto.STRING), "element type 8"),
        (_input_type(4, dims=["batch", 4, 1]), r"\[batch, 4, 1\], the manifest says \[batch, 4\]"),
        (_input_type(4, dims=["batch", 5]), r"\[batch, 5\], the manifest says"),
        (_input_type(4, dims=["rows", 4]), r"\[rows, 4\], the manifest says"),
        (_input_type(4, dims=[8, 4]), r"\[8, 4\], the manifest says"),
        (_input_type(4, unshaped=True), "no shape, the manifest says"),
        (lambda m: m.graph.node.pop(), "onnxruntime refuses the graph"),
    ],
)
def test_graphs_that_disagree_with_the_manifest(
    tmp_path: Path, edit: Callable[[onnx.ModelProto], object], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        Trainer(edited(tmp_path, edit))


def test_bytes_in_onnxruntimes_own_format_are_not_loaded(tmp_path: Path) -> None:
    manifest, files = linear_parts()
    # Protobuf to our reader, with the mark of onnxruntime's format where it looks for one.
    disguised = b"\x12\x06abORTM" + files["train.onnx"]
    assert disguised[4:8] == b"ORTM"
    write_artifact(tmp_path, manifest, {**files, "train.onnx": disguised})
    assert Trainer(tmp_path).step_count == 0


def test_a_racing_scatter_must_be_declared(tmp_path: Path) -> None:
    manifest, files = factor_parts()
    write_artifact(tmp_path, dataclasses.replace(manifest, sequential=False), files)
    with pytest.raises(ArtifactError, match="races under several threads"):
        load_artifact(tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("mean", None, "lacks tensor 'mean'"),
        ("more", np.zeros(1, np.float32), "unknown tensor 'more'"),
        ("mean", np.zeros(4), r"'mean' is float64\[4\], the manifest says float32\[4\]"),
        ("mean", np.zeros(5, np.float32), r"'mean' is float32\[5\]"),
    ],
)
def test_initial_values_that_disagree_with_the_manifest(
    tmp_path: Path, name: str, array: np.ndarray | None, message: str
) -> None:
    manifest, files = linear_parts()
    tensors = dict(decode(files[INITIAL_FILE]).tensors)
    if array is None:
        del tensors[name]
    else:
        tensors[name] = array
    write_artifact(tmp_path, manifest, {**files, INITIAL_FILE: encode(tensors)})
    with pytest.raises(ArtifactError, match=message):
        load_artifact(tmp_path)


def test_listed_external_data_is_loaded_from_the_checked_bytes(tmp_path: Path) -> None:
    manifest, files = linear_parts()
    model = onnx.load_from_string(files["train.onnx"])
    # onnxruntime wants external tensors of some size, so add one and use it: 64 tenths, all equal.
    tenth = next(tensor for tensor in model.graph.initializer if tensor.name == "tenth")
    model.graph.initializer.remove(tenth)
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[64])
    table.data_location = TensorProto.EXTERNAL
    table.external_data.add(key="location", value="tables.bin")
    table.external_data.add(key="offset", value="0")
    table.external_data.add(key="length", value="256")
    model.graph.initializer.append(table)
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["table"], ["tenth"], keepdims=0))
    data = np.full(64, 0.1, np.float32).tobytes()
    edited_files = {**files, "train.onnx": model.SerializeToString(), "tables.bin": data}
    write_artifact(tmp_path / "external", manifest, edited_files)
    write_artifact(tmp_path / "plain", manifest, files)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(5, 4)).astype(np.float32),
        "y": rng.normal(size=(5, 3)).astype(np.float32),
    }
    external, plain = Trainer(tmp_path / "external"), Trainer(tmp_path / "plain")
    assert external.step(batch) == plain.step(batch)
    np.testing.assert_allclose(external.buffers["mean"], plain.buffers["mean"], rtol=1e-6)
    (tmp_path / "external" / "tables.bin").write_bytes(b"\0" * 256)
    with pytest.raises(ArtifactError, match=r"tables\.bin was changed"):
        Trainer(tmp_path / "external")


def test_every_flipped_byte_of_the_folder_is_noticed(tmp_path: Path) -> None:
    manifest = factor_artifact(tmp_path)
    rng = np.random.default_rng(0)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for position in rng.integers(0, len(data), 60):
            mutated = bytearray(data)
            mutated[position] ^= 1 << rng.integers(0, 8)
            path.write_bytes(mutated)
            try:
                # A changed manifest may be valid: then it is another artifact.
                assert load_artifact(tmp_path).manifest.id != manifest.id
            except ArtifactError:
                continue
        path.write_bytes(data)
    load_artifact(tmp_path)


def test_the_package_needs_neither_onnxruntime_nor_torch_nor_onnx() -> None:
    code = (
        "import sys, device_sdk, device_sdk.artifact as a\n"
        "assert not {'onnxruntime', 'torch', 'onnx'} & set(sys.modules), sys.modules\n"
        "import os; assert os.environ['ORT_DISABLE_TELEMETRY'] == '1'\n"
        "assert 'Trainer' in dir(device_sdk)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS, env=child_environment()
    )
