"""Artifacts written node by node: the ONNX files, and the manifest beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    FileEntry,
    GraphFile,
    Manifest,
    Port,
    StateTensor,
)
from device_sdk.artifact.safetensors import Array

OPSET = 20
LOSS = Port("loss", "loss", "loss", "float32", ())
GUARD = Port("guard", "guard", "guard", "float32", ())
NO_FILES = {name: FileEntry(0, "0" * 64) for name in ("train.onnx", "infer.onnx", INITIAL_FILE)}
"""Stands in a manifest until `write_artifact` knows the files."""

_ELEMENT = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "float64": TensorProto.DOUBLE}


def onnx_bytes(
    graph: GraphFile,
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


def state_ports(state: Sequence[StateTensor], prefix: str) -> tuple[Port, ...]:
    """A port for each state tensor, as ``<prefix>.<name>``."""
    return tuple(Port(f"{prefix}.{t.name}", "state", t.name, t.dtype, t.shape) for t in state)
