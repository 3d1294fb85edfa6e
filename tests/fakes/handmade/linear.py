"""A linear model with a buffer, SGD with momentum, and everything small packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from device_sdk.artifact import (
    INITIAL_FILE,
    Axis,
    GraphFile,
    Manifest,
    Member,
    MetricSource,
    OptimizerSpec,
    Port,
    StateTensor,
)
from device_sdk.artifact.safetensors import Array, encode
from tests.fakes.handmade.writing import (
    GUARD,
    LOSS,
    NO_FILES,
    OPSET,
    onnx_bytes,
    state_ports,
    write_artifact,
)
from tests.fakes.linear_sizes import FEATURES, TARGETS


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
        StateTensor("mean", "buffer", "float32", (FEATURES,), (Member("mean", (FEATURES,), 0),)),
        StateTensor("sgd.packed", "optimizer", "float32", (size,), like="packed"),
        StateTensor("step", "counter", "int64", ()),
    )
    x = Port("batch.x", "batch", "x", "float32", ("batch", FEATURES))
    y = Port("batch.y", "batch", "y", "float32", ("batch", TARGETS))
    train = GraphFile(
        "train.onnx",
        (
            *state_ports(state, "state"),
            x,
            y,
            Port("hyper.lr", "hyper", "lr", "float32", (), 0.125),
            Port("seed", "seed", "seed", "int64", ()),
        ),
        (
            LOSS,
            GUARD,
            *state_ports(state, "new"),
            Port("output.prediction", "output", "prediction", "float32", ("batch", TARGETS)),
            Port("output.seed", "output", "seed", "int64", ()),
        ),
    )
    infer = GraphFile(
        "infer.onnx",
        (state_ports(state, "state")[0], x),
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
        optimizer=OptimizerSpec("sgd", {"momentum": 0.9}),
        graphs={"train": train, "infer": infer},
        files=NO_FILES,
        producer={"tessera": "0.1.0"},
        sequential=False,
    )
    return manifest, files


def frozen_parts() -> tuple[Manifest, dict[str, bytes]]:
    """The linear artifact with its mean frozen: taken from x, and left as it is by a step."""
    manifest, files = linear_parts()
    train = manifest.graphs["train"]
    kept = tuple(port for port in train.outputs if port.name != "new.mean")
    model = onnx.load_from_string(files["train.onnx"])
    (outputs,) = [each for each in model.graph.output if each.name == "new.mean"]
    model.graph.output.remove(outputs)
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Transpose"):
            node.input[0] = node.input[0].replace("batch.x", "centred")
    centre = helper.make_node("Sub", ["batch.x", "state.mean"], ["centred"])
    model.graph.node.insert(0, centre)
    onnx.checker.check_model(model)
    frozen = replace(
        manifest,
        state=tuple(replace(t, frozen=t.name == "mean") for t in manifest.state),
        graphs={**manifest.graphs, "train": replace(train, outputs=kept)},
    )
    return frozen, {**files, "train.onnx": model.SerializeToString()}


def frozen_manifest() -> Manifest:
    """That of :func:`frozen_parts`."""
    return frozen_parts()[0]


def frozen_artifact(folder: Path) -> Manifest:
    """Write the linear artifact with its mean frozen."""
    return write_artifact(folder, *frozen_parts())


def gated_manifest() -> Manifest:
    """What the linear artifact's manifest would be if its weights were written in place."""
    manifest = linear_parts()[0]
    train = manifest.graphs["train"]
    flags = [Port(name, name, name, "bool", ()) for name in ("begun", "done")]
    known, told = (Port(name, "bounds", name, "float32", (2,)) for name in ("bounds", "new_bounds"))
    gated = replace(train, inputs=(*train.inputs, known), outputs=(*train.outputs, *flags, told))
    return replace(
        manifest,
        state=tuple(replace(t, in_place=t.name == "packed") for t in manifest.state),
        graphs={**manifest.graphs, "train": gated},
    )


def linear_artifact(folder: Path, *metrics: str, least: int = 1) -> Manifest:
    """Write the linear artifact; it names these metrics, of the prediction and y.

    ``least``: how many rows a batch must have.
    """
    manifest, files = linear_parts()
    axes = {"batch": replace(manifest.axes["batch"], least=least)}
    named = dict.fromkeys(metrics, MetricSource("prediction", "y"))
    return write_artifact(folder, replace(manifest, axes=axes, metrics=named), files)
