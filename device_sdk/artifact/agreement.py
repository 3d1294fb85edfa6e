"""Does an ONNX file hold what the manifest says, and nothing that is not allowed?"""

from __future__ import annotations

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.graph import Graph, Port
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.onnx_reader import OnnxModel, Value
from device_sdk.artifact.shapes import Dim, Shape, describe


def check_agreement(manifest: Manifest, graph: Graph, model: OnnxModel) -> None:
    """Raise ArtifactError naming the first point in which file and manifest differ."""
    _check_operators(manifest, graph, model)
    _check_ports(graph, graph.inputs, model.inputs, "input")
    _check_ports(graph, graph.outputs, model.outputs, "output")
    defaults = model.initializers & {value.name for value in model.inputs}
    if defaults:
        raise ArtifactError(f"{graph.file}: input {min(defaults)!r} has a default inside the graph")
    for location in sorted(model.external):
        if location not in manifest.files:
            raise ArtifactError(
                f"{graph.file}: a tensor's data lies in {location!r:.200}, which is not one of the "
                "artifact's files"
            )


def _check_operators(manifest: Manifest, graph: Graph, model: OnnxModel) -> None:
    for domain, operator in model.operators:
        if domain:
            raise ArtifactError(
                f"{graph.file}: operator {domain}.{operator} is not allowed: artifacts hold "
                "standard ONNX operators only"
            )
    if model.functions:
        raise ArtifactError(
            f"{graph.file}: holds the function {model.functions[0]!r}; functions must be inlined"
        )
    # Other domains' imports are harmless without nodes, but no exporter of ours writes them.
    if model.opsets != {"": manifest.opset}:
        raise ArtifactError(
            f"{graph.file}: imports opsets {model.opsets}, the manifest says {manifest.opset}"
        )
    if model.racing_scatters and not manifest.sequential:
        raise ArtifactError(
            f"{graph.file}: holds ScatterND with a reduction, which races under several threads, "
            "but the manifest does not say sequential"
        )


def _check_ports(graph: Graph, ports: tuple[Port, ...], values: list[Value], side: str) -> None:
    found = {value.name: value for value in values}
    if len(found) != len(values):
        raise ArtifactError(f"{graph.file}: two {side}s have the same name")
    wanted = {port.name for port in ports}
    for name in sorted(wanted - set(found)):
        raise ArtifactError(f"{graph.file}: has no {side} {name!r}, which the manifest lists")
    for name in sorted(set(found) - wanted):
        raise ArtifactError(f"{graph.file}: has an {side} {name!r} that the manifest does not list")
    for port in ports:
        value = found[port.name]
        if value.dtype != port.dtype:
            raise ArtifactError(
                f"{graph.file}: {side} {port.name!r} is {value.dtype}, the manifest says "
                f"{port.dtype}"
            )
        if not _shapes_agree(port.shape, value.shape, strict=side == "input"):
            shown = "no shape" if value.shape is None else describe(value.shape)
            raise ArtifactError(
                f"{graph.file}: {side} {port.name!r} has {shown}, the manifest says "
                f"{describe(port.shape)}"
            )


def _shapes_agree(port: Shape, value: Shape | None, *, strict: bool) -> bool:
    if value is None:
        # onnxruntime infers an output's shape itself where the file leaves it out.
        return not strict
    return len(port) == len(value) and all(
        _dims_agree(wanted, found, strict) for wanted, found in zip(port, value, strict=True)
    )


def _dims_agree(wanted: Dim, found: Dim, strict: bool) -> bool:
    if wanted is None:
        return True
    return wanted == found or (found is None and not strict)
