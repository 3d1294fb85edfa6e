"""Nodes that move nothing, or that do in several steps what one does.

A node costs onnxruntime about 1 us whatever it computes, and a small step is 150 of them. What is
left out here changes no bit of a result: a Reshape to the shape that is there, the axes of size 1
that a sum keeps and a Reshape takes away, and arithmetic on each part of a pack that could be on
the whole of it (batch norm's running statistics and counters).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import onnx

from export.lowering.graph import Graph, live_nodes, rename, used_names
from export.symbols import Dim, same_shape

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div"}


Key = TypeVar("Key")


def simplify(g: Graph, outputs: Mapping[Key, str]) -> dict[Key, str]:
    """Make the graph's nodes fewer; the outputs' values, of which some may have other names now."""
    names = _Simpler(g, outputs.values()).names
    return {output: names.get(name, name) for output, name in outputs.items()}


class _Simpler:
    def __init__(self, g: Graph, ends: Collection[str]) -> None:
        self._g = g
        self.names: dict[str, str] = {}
        before = live_nodes(g.taken_out(), ends)
        self._uses = Counter(name for node in before for name in used_names([node]))
        self._uses.update(ends)
        for node in before:
            rename(node, self.names)
            instead = self._reshape(node) or self._concat(node)
            if instead is None:
                g.nodes.append(node)
            else:
                self.names[node.output[0]] = instead

    def _reshape(self, node: onnx.NodeProto) -> str | None:
        source = node.input[0] if node.op_type == "Reshape" else ""
        before, after = self._shape(source), self._shape(node.output[0])
        if before is None or after is None:
            return None
        if same_shape(before, after):
            return source
        reduction = self._g.producer.get(source)
        if reduction is None or reduction.op_type != "ReduceSum" or self._uses[source] > 1:
            return None
        kept = all(a.i for a in reduction.attribute if a.name == "keepdims")
        axes = self._g.array(reduction.input[1])
        if not kept or axes is None or not same_shape(_without(before, axes.tolist()), after):
            return None
        return self._g.op("ReduceSum", *reduction.input, keepdims=0)

    def _concat(self, node: onnx.NodeProto) -> str | None:
        vectors = node.op_type == "Concat" and all(map(self._vector, node.input))
        return self._whole(node.input) if vectors else None

    def _whole(self, parts: Sequence[str]) -> str | None:
        """The vector of these values' elements one after the other, where parts of it made them."""
        makers = [self._g.producer.get(part) for part in parts]
        first = makers[0]
        if first is None or any(m is None or m.op_type != first.op_type for m in makers):
            return None
        nodes = [maker for maker in makers if maker is not None]
        if first.op_type == "Split":
            source = first.input[0]
            return source if list(first.output) == list(parts) and self._vector(source) else None
        if first.op_type == "Reshape":
            return self._whole([node.input[0] for node in nodes])
        if first.op_type not in _ELEMENTWISE or any(self._uses[part] > 1 for part in parts):
            return None
        sides = [[node.input[side] for node in nodes] for side in (0, 1)]
        wholes = [self._number(side) or self._aligned(side, parts) for side in sides]
        if not any(whole and whole not in side for whole, side in zip(wholes, sides, strict=True)):
            return None  # no part of a pack among them: joining them would be no gain
        joined = [
            whole or self._joined(side, parts) for whole, side in zip(wholes, sides, strict=True)
        ]
        return None if None in joined else self._g.op(first.op_type, *joined)

    def _aligned(self, side: Sequence[str], parts: Sequence[str]) -> str | None:
        """The whole of one side's operands, where each has its result's shape."""
        alike = all(self._alike(a, b) for a, b in zip(side, parts, strict=True))
        return self._whole(side) if alike else None

    def _number(self, side: Sequence[str]) -> str | None:
        number = self._g.array(side[0])
        same_one = number is not None and number.ndim == 0 and len(set(side)) == 1
        return side[0] if same_one else None

    def _joined(self, side: Sequence[str], parts: Sequence[str]) -> str | None:
        vectors = all(
            self._alike(a, b) and self._vector(a) for a, b in zip(side, parts, strict=True)
        )
        return self._g.op("Concat", *side, axis=0) if vectors else None

    def _alike(self, a: str, b: str) -> bool:
        one, other = self._shape(a), self._shape(b)
        return one is not None and other is not None and same_shape(one, other)

    def _vector(self, name: str) -> bool:
        return len(self._shape(name) or ()) == 1

    def _shape(self, name: str) -> tuple[Dim, ...] | None:
        return self._g.shapes.get(name)


def _without(shape: Sequence[Dim], axes: Sequence[int]) -> list[Dim]:
    return [size for place, size in enumerate(shape) if place not in axes]
