"""A factorisation whose axes are named, which scatters its gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from device_sdk.artifact import (
    INITIAL_FILE,
    Axis,
    GraphFile,
    Manifest,
    Member,
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


def factor_parts() -> tuple[Manifest, dict[str, bytes]]:
    """Two embeddings with named axes: mean (u . v + b - r)^2, plain SGD on V, heavy ball on U.

    V [items, k] and its bias [items] share an axis; U [users, k] has momentum 0.5. The gradient is
    scattered with ScatterND, so the artifact is sequential. The output `hits` has a length only the
    graph knows: the positions where the prediction is positive.
    """
    state = (
        StateTensor(
            "V",
            "parameter",
            "float32",
            ("items", "k"),
            (Member("items.weight", ("items", "k"), 0),),
        ),
        StateTensor(
            "b", "parameter", "float32", ("items",), (Member("items.bias", ("items",), 0),)
        ),
        StateTensor(
            "U",
            "parameter",
            "float32",
            ("users", "k"),
            (Member("users.weight", ("users", "k"), 0),),
        ),
        StateTensor("sgd.U", "optimizer", "float32", ("users", "k"), like="U"),
        StateTensor("step", "counter", "int64", ()),
    )
    entries = (
        Port("batch.user", "batch", "user", "int64", ("batch",)),
        Port("batch.item", "batch", "item", "int64", ("batch",)),
    )
    rating = Port("batch.rating", "batch", "rating", "float32", ("batch",))
    train = GraphFile(
        "train.onnx",
        (
            *state_ports(state, "state"),
            *entries,
            rating,
            Port("hyper.lr", "hyper", "lr", "float32", (), 0.05),
        ),
        (
            LOSS,
            GUARD,
            *state_ports(state, "new"),
            Port("output.hits", "output", "hits", "int64", (1, None)),
        ),
    )
    infer = GraphFile(
        "infer.onnx",
        (*state_ports(state[:1], "state"), state_ports(state[2:3], "state")[0]),
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
        optimizer=OptimizerSpec("sgd", {}),
        graphs={"train": train, "infer": infer},
        files=NO_FILES,
        producer={},
        sequential=True,
    )
    return manifest, files


def factor_artifact(folder: Path) -> Manifest:
    """Write the factorisation artifact."""
    return write_artifact(folder, *factor_parts())
