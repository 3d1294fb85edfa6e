"""A graph whose inputs that never change are constants: onnxruntime can then work ahead with them.

A convolution takes the batch normalisation behind it into its own weights, and lays them out for
this machine's instructions; what depends on constants alone is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping

from device_sdk.artifact import onnx_writer as write
from device_sdk.artifact.load import CheckedGraph
from device_sdk.artifact.onnx_reader import Budget, fields, message, text
from device_sdk.artifact.safetensors import Array

_GRAPH, _INITIALIZER, _INPUT = 7, 5, 11


def with_constants(graph: CheckedGraph, values: Mapping[str, Array]) -> CheckedGraph:
    """The checked graph with some of its inputs, by their names, as initializers.

    The data lie beside the file, as `external` data do, so that they are copied only once.
    """
    if not values:
        return graph
    budget = Budget()
    files: dict[str, bytes] = {}
    constants = []
    for index, (name, array) in enumerate(values.items()):
        # No name of an artifact's file has a slash in it.
        location = f"constant/{index}"
        files[location] = array.tobytes()
        constants.append(write.data(_INITIALIZER, write.external_tensor(name, array, location)))
    parts = []
    for number, wire, value in fields(memoryview(graph.onnx), budget):
        if number != _GRAPH:
            parts.append(write.copied(number, wire, value))
            continue
        body = [
            write.copied(inner, kind, each)
            for inner, kind, each in fields(message(wire, value, "graph"), budget)
            if inner != _INPUT or _name(message(kind, each, "input"), budget) not in values
        ]
        parts.append(write.data(_GRAPH, b"".join([*body, *constants])))
    return CheckedGraph(b"".join(parts), {**graph.external, **files}, graph.model)


def _name(value_info: memoryview, budget: Budget) -> str:
    for number, wire, value in fields(value_info, budget):
        if number == 1:
            return text(wire, value, "input's name")
    return ""
