"""Small artifacts whose train graphs are written node by node, so that tests need no exporter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import device_sdk
from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    Axis,
    FileEntry,
    Graph,
    Manifest,
    Member,
    Optimizer,
    Port,
    StateTensor,
)
from device_sdk.artifact.safetensors import Array, encode

OPSET = 20


def child_environment() -> dict[str, str]:
    """The environment for a child process that imports what this process imports."""
    return {**os.environ, "PYTHONPATH": str(Path(device_sdk.__file__).parents[1])}


_ELEMENT = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "float64": TensorProto.DOUBLE}


def onnx_bytes(
    graph: Graph,
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Array] | None = None,
    opset: int = OPSET,
) -> bytes:
    """An ONNX file with the signature of `graph`."""

    def info(port: Port) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(port.name, _ELEMENT[port.dtype], list(port.shape))

    model = helper.make_model(
        helper.make_graph(
            list(nodes),
            "graph",
            [info(port) for port in graph.inputs],
            [info(port) for port in graph.outputs],
            [onnx.numpy_helper.from_array(v, k) for k, v in (constants or {}).items()],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def write_artifact(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
    """Write files and a manifest that describes them; returns that manifest."""
    manifest = dataclasses.replace(
        manifest, files={name: FileEntry.of(data) for name, data in files.items()}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    return manifest


def _state_ports(state: Sequence[StateTensor], prefix: str) -> tuple[Port, ...]:
    return tuple(Port(f"{prefix}.{t.name}", "state", t.name, t.dtype, t.shape) for t in state)


LOSS = Port("loss", "loss", "loss", "float32", ())
GUARD = Port("guard", "guard", "guard", "float32", ())
_NO_FILES = {name: FileEntry(0, "0" * 64) for name in ("train.onnx", "infer.onnx", INITIAL_FILE)}

FEATURES, TARGETS = 4, 3


def linear_parts() -> tuple[Manifest, dict[str, bytes]]:
    """y = x W + b, mean squared error, SGD with momentum 0.9; W and b packed; a mean as buffer.

    The buffer is mean <- 0.9 mean + 0.1 mean(x). Extra outputs: prediction, and the seed it got.
    """
    size = FEATURES * TARGETS + TARGETS
    state = (
        StateTensor(
            "packed",
            "parameter",
            "float32",
            (size,),
            (
                Member("linear.weight", (FEATURES, TARGETS), 0),
                Member("linear.bias", (TARGETS,), FEATURES * TARGETS),
            ),
        ),
        StateTensor("mean", "buffer", "float32", (FEATURES,), (Member("mean", (FEATURES,)),)),
        StateTensor("sgd.packed", "optimizer", "float32", (size,), like="packed"),
        StateTensor("step", "counter", "int64", ()),
    )
    x = Port("batch.x", "batch", "x", "float32", ("batch", FEATURES))
    y = Port("batch.y", "batch", "y", "float32", ("batch", TARGETS))
    train = Graph(
        "train.onnx",
        (
            *_state_ports(state, "state"),
            x,
            y,
            Port("hyper.lr", "hyper", "lr", "float32", (), 0.125),
            Port("seed", "seed", "seed", "int64", ()),
        ),
        (
            LOSS,
            GUARD,
            *_state_ports(state, "new"),
            Port("output.prediction", "output", "prediction", "float32", ("batch", TARGETS)),
            Port("output.seed", "output", "seed", "int64", ()),
        ),
    )
    infer = Graph(
        "infer.onnx",
        (_state_ports(state, "state")[0], x),
        (
            Port("output.prediction", "output", "prediction", "float32", ("batch", TARGETS)),
            Port("output.packed", "output", "packed", "float32", (size,)),
        ),
    )
    n = helper.make_node
    forward = [
        n("Slice", ["state.packed", "zero1", "split"], ["w.flat"]),
        n("Slice", ["state.packed", "split", "end"], ["b"]),
        n("Reshape", ["w.flat", "w.shape"], ["w"]),
        n("MatMul", ["batch.x", "w"], ["xw"]),
        n("Add", ["xw", "b"], ["output.prediction"]),
    ]
    constants: dict[str, Array] = {
        "zero1": np.array([0], np.int64),
        "split": np.array([FEATURES * TARGETS], np.int64),
        "end": np.array([size], np.int64),
        "w.shape": np.array([FEATURES, TARGETS], np.int64),
    }
    nodes = [
        *forward,
        n("Sub", ["output.prediction", "batch.y"], ["error"]),
        n("Mul", ["error", "error"], ["square"]),
        n("ReduceMean", ["square"], ["loss"], keepdims=0),
        n("Size", ["error"], ["count.int"]),
        n("Cast", ["count.int"], ["count"], to=TensorProto.FLOAT),
        n("Div", ["two", "count"], ["scale"]),
        n("Mul", ["error", "scale"], ["grad.out"]),
        n("Transpose", ["batch.x"], ["xt"], perm=[1, 0]),
        n("MatMul", ["xt", "grad.out"], ["grad.w"]),
        n("Reshape", ["grad.w", "minus1"], ["grad.w.flat"]),
        n("ReduceSum", ["grad.out", "zero1"], ["grad.b"], keepdims=0),
        n("Concat", ["grad.w.flat", "grad.b"], ["grad"], axis=0),
        n("Mul", ["state.sgd.packed", "momentum"], ["decayed"]),
        n("Add", ["decayed", "grad"], ["new.sgd.packed"]),
        n("Mul", ["new.sgd.packed", "hyper.lr"], ["delta"]),
        n("Sub", ["state.packed", "delta"], ["new.packed"]),
        n("ReduceMean", ["batch.x", "zero1"], ["x.mean"], keepdims=0),
        n("Mul", ["x.mean", "tenth"], ["x.tenth"]),
        n("Mul", ["state.mean", "momentum"], ["mean.decayed"]),
        n("Add", ["mean.decayed", "x.tenth"], ["new.mean"]),
        n("Add", ["state.step", "one"], ["new.step"]),
        n("ReduceSum", ["new.packed"], ["sum.a"], keepdims=0),
        n("ReduceSum", ["new.sgd.packed"], ["sum.b"], keepdims=0),
        n("ReduceSum", ["new.mean"], ["sum.c"], keepdims=0),
        n("Sum", ["sum.a", "sum.b", "sum.c"], ["guard"]),
        n("Identity", ["seed"], ["output.seed"]),
    ]
    more: dict[str, Array] = {
        "two": np.array(2, np.float32),
        "minus1": np.array([-1], np.int64),
        "momentum": np.array(0.9, np.float32),
        "tenth": np.array(0.1, np.float32),
        "one": np.array(1, np.int64),
    }
    rng = np.random.default_rng(7)
    files = {
        "train.onnx": onnx_bytes(train, nodes, {**constants, **more}),
        "infer.onnx": onnx_bytes(
            infer, [*forward, n("Identity", ["state.packed"], ["output.packed"])], constants
        ),
        INITIAL_FILE: encode(
            {
                "linear.weight": rng.normal(size=(FEATURES, TARGETS)).astype(np.float32),
                "linear.bias": rng.normal(size=TARGETS).astype(np.float32),
                "mean": np.full(FEATURES, 0.5, np.float32),
            }
        ),
    }
    manifest = Manifest(
        name="linear",
        opset=OPSET,
        axes={"batch": Axis(8)},
        state=state,
        optimizer=Optimizer("sgd", {"momentum": 0.9}),
        graphs={"train": train, "infer": infer},
        files=_NO_FILES,
        producer={"tessera": "0.1.0"},
    )
    return manifest, files


def linear_artifact(folder: Path) -> Manifest:
    """Write the linear artifact."""
    return write_artifact(folder, *linear_parts())


def factor_parts() -> tuple[Manifest, dict[str, bytes]]:
    """Two embeddings with named axes: mean (u . v + b - r)^2, plain SGD on V, heavy ball on U.

    V [items, k] and its bias [items] share an axis; U [users, k] has momentum 0.5. The gradient is
    scattered with ScatterND, so the artifact is sequential. The output `hits` has a length only the
    graph knows: the positions where the prediction is positive.
    """
    state = (
        StateTensor(
            "V", "parameter", "float32", ("items", "k"), (Member("items.weight", ("items", "k")),)
        ),
        StateTensor("b", "parameter", "float32", ("items",), (Member("items.bias", ("items",)),)),
        StateTensor(
            "U", "parameter", "float32", ("users", "k"), (Member("users.weight", ("users", "k")),)
        ),
        StateTensor("sgd.U", "optimizer", "float32", ("users", "k"), like="U"),
        StateTensor("step", "counter", "int64", ()),
    )
    entries = (
        Port("batch.user", "batch", "user", "int64", ("batch",)),
        Port("batch.item", "batch", "item", "int64", ("batch",)),
    )
    rating = Port("batch.rating", "batch", "rating", "float32", ("batch",))
    train = Graph(
        "train.onnx",
        (
            *_state_ports(state, "state"),
            *entries,
            rating,
            Port("hyper.lr", "hyper", "lr", "float32", (), 0.05),
        ),
        (
            LOSS,
            GUARD,
            *_state_ports(state, "new"),
            Port("output.hits", "output", "hits", "int64", (1, None)),
        ),
    )
    infer = Graph(
        "infer.onnx",
        (*_state_ports(state[:1], "state"), _state_ports(state[2:3], "state")[0]),
        (Port("output.scores", "output", "scores", "float32", ("users", "items")),),
    )
    n = helper.make_node
    nodes = [
        n("Gather", ["state.V", "batch.item"], ["v"], axis=0),
        n("Gather", ["state.b", "batch.item"], ["bias"], axis=0),
        n("Gather", ["state.U", "batch.user"], ["u"], axis=0),
        n("Mul", ["u", "v"], ["uv"]),
        n("ReduceSum", ["uv", "one1"], ["dot"], keepdims=0),
        n("Add", ["dot", "bias"], ["prediction"]),
        n("Sub", ["prediction", "batch.rating"], ["error"]),
        n("Mul", ["error", "error"], ["square"]),
        n("ReduceMean", ["square"], ["loss"], keepdims=0),
        n("Size", ["error"], ["count.int"]),
        n("Cast", ["count.int"], ["count"], to=TensorProto.FLOAT),
        n("Div", ["two", "count"], ["scale"]),
        n("Mul", ["error", "scale"], ["g"]),
        n("Unsqueeze", ["g", "one1"], ["g.column"]),
        n("Mul", ["g.column", "u"], ["rows.V"]),
        n("Mul", ["g.column", "v"], ["rows.U"]),
        n("Unsqueeze", ["batch.item", "one1"], ["item.index"]),
        n("Unsqueeze", ["batch.user", "one1"], ["user.index"]),
    ]
    for name, rows, index in (("V", "rows.V", "item"), ("b", "g", "item"), ("U", "rows.U", "user")):
        nodes += [
            n("Sub", [f"state.{name}", f"state.{name}"], [f"zeros.{name}"]),
            n(
                "ScatterND",
                [f"zeros.{name}", f"{index}.index", rows],
                [f"grad.{name}"],
                reduction="add",
            ),
        ]
    nodes += [
        n("Mul", ["state.sgd.U", "half"], ["decayed"]),
        n("Add", ["decayed", "grad.U"], ["new.sgd.U"]),
    ]
    for name, direction in (("V", "grad.V"), ("b", "grad.b"), ("U", "new.sgd.U")):
        nodes += [
            n("Mul", [direction, "hyper.lr"], [f"delta.{name}"]),
            n("Sub", [f"state.{name}", f"delta.{name}"], [f"new.{name}"]),
            n("ReduceSum", [f"new.{name}"], [f"sum.{name}"], keepdims=0),
        ]
    nodes += [
        n("ReduceSum", ["new.sgd.U"], ["sum.sgd"], keepdims=0),
        n("Sum", ["sum.V", "sum.b", "sum.U", "sum.sgd"], ["guard"]),
        n("Add", ["state.step", "one"], ["new.step"]),
        n("Greater", ["prediction", "zero"], ["positive"]),
        n("NonZero", ["positive"], ["output.hits"]),
    ]
    constants: dict[str, Array] = {
        "one1": np.array([1], np.int64),
        "one": np.array(1, np.int64),
        "zero": np.array(0, np.float32),
        "half": np.array(0.5, np.float32),
        "two": np.array(2, np.float32),
    }
    rng = np.random.default_rng(3)
    files = {
        "train.onnx": onnx_bytes(train, nodes, constants),
        "infer.onnx": onnx_bytes(
            infer,
            [
                n("Transpose", ["state.V"], ["Vt"], perm=[1, 0]),
                n("MatMul", ["state.U", "Vt"], ["output.scores"]),
            ],
        ),
        INITIAL_FILE: encode(
            {
                "items.weight": rng.normal(size=(6, 2)).astype(np.float32),
                "items.bias": np.zeros(6, np.float32),
                "users.weight": rng.normal(size=(3, 2)).astype(np.float32),
            }
        ),
    }
    manifest = Manifest(
        name="factors",
        opset=OPSET,
        axes={"batch": Axis(5), "items": Axis(6), "users": Axis(3), "k": Axis(2)},
        state=state,
        optimizer=Optimizer("sgd"),
        graphs={"train": train, "infer": infer},
        files=_NO_FILES,
        sequential=True,
    )
    return manifest, files


def factor_artifact(folder: Path) -> Manifest:
    """Write the factorisation artifact."""
    return write_artifact(folder, *factor_parts())
