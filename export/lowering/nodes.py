"""What can be asked of ONNX nodes: equality, names, and which of them are needed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import onnx


def same_node(
    op_type: str, sources: list[str], wanted: list[bool], attributes: Mapping[str, Any]
) -> Hashable | None:
    """A key that equal nodes share; None for nodes with graphs or tensors as attributes."""
    plain: list[tuple[str, Hashable]] = []
    for name, value in sorted(attributes.items()):
        if isinstance(value, (list, tuple)):
            value = tuple(value)
        elif not isinstance(value, (int, float, str)):
            return None
        plain.append((name, value))
    return op_type, tuple(sources), tuple(wanted), tuple(plain)


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            if name in names:
                field[index] = names[name]
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                rename(inner, names)


def used_names(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= used_names(attribute.g.node)
                names.update(output.name for output in attribute.g.output)
    return names


def live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    needed = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed.intersection(name for name in node.output if name):
            kept.append(node)
            needed |= used_names([node])
    kept.reverse()
    return kept
