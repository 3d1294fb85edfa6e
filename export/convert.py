"""A recorded aten graph to an ONNX model in default-domain operators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx
import sympy
import torch
from onnx import helper
from torch import Tensor, fx

import export.lowering  # noqa: F401  (fills the registry)
from export.lowering.graph import ONNX_DTYPE, Graph, Value, live_nodes, rename, used_names
from export.lowering.walk import Walk, probabilities, value_of
from export.lowering.ways import Way, chosen, said, tree_of
from export.mutation import nodes_behind
from export.symbols import Dim, same_shape, symbols_in
from export.trace import Trace

WAY = "way"
"""The output that says which way a step took, by its number: for verification."""


@dataclass(frozen=True)
class Lowered:
    """A model, and the ways that a step can take in it: what was asked, and the answers."""

    model: onnx.ModelProto
    ways: Mapping[int, Sequence[str]]


def to_onnx(trace: Trace, outputs: Sequence[str], *, name: str) -> onnx.ModelProto:
    """The model that computes ``outputs`` (names of the trace's results).

    Inputs that these outputs do not depend on are left out, but for those that alone have an axis
    of a least size. Raises ExportError for an operator
    without a lowering.
    """
    return lowered(trace, outputs, name=name).model


def lowered(trace: Trace, outputs: Sequence[str], *, name: str) -> Lowered:
    """As ``to_onnx``; ``WAY`` may be among the outputs of a trace in several ways."""
    recordings = trace.ways
    several = any(several_threads_pay(each.graph.graph.nodes) for each in recordings)
    graph = Graph(several_threads=several)
    ways = [_way(each, number, graph, outputs) for number, each in enumerate(recordings)]
    least = trace.check_axes()
    tree = tree_of(ways) if trace.others else 0
    if isinstance(tree, int):
        way = ways[tree]
        values, infos = simplify(graph, way.values), way.infos
    else:
        ways = _simplified(graph, ways)
        tree = tree_of(ways)
        values, infos = chosen(graph, ways, tree)
    graph.rename_outputs(values)
    candidates = {
        input_name: helper.make_tensor_value_info(
            input_name, ONNX_DTYPE[spec.dtype], list(spec.shape)
        )
        for input_name, spec in trace.inputs.items()
    }
    model = graph.model(name, [], [infos[output] for output in outputs], metadata={})
    used = used_names(model.graph.node)
    known = {axis for key in used & set(candidates) for axis in trace.inputs[key].shape}
    for axis in set(least) - known:
        # The code asked for its length: taken, so that a device can tell that it is long enough.
        used.add(next(key for key, spec in trace.inputs.items() if axis in spec.shape))
    model.graph.input.extend(info for key, info in candidates.items() if key in used)
    return Lowered(model, said(tree))


def _way(trace: Trace, number: int, graph: Graph, outputs: Sequence[str]) -> Way:
    """One recording, lowered into the graph beside the others."""
    graph.begin_way()
    axis_of = {axis: symbol for symbol, axis in trace.symbols.items()}
    for input_name, spec in trace.inputs.items():
        for dim, size in enumerate(spec.shape):
            if isinstance(size, str):
                graph.bind_symbol(axis_of[size], input_name, dim)
    questions = trace.env.questions
    # Whether two ways are one is asked of all that they compute.
    wanted = trace.outputs if questions else outputs
    results = _results(trace, graph, wanted)
    infos = {output: _output(output, results[output], trace.symbols) for output in wanted}
    values = {output: results[output].name for output in outputs if output != WAY}
    key = [results[output].name for output in wanted]
    refuses = next((name for name in ("guard", "loss") if name in values), None)
    needed = list(filter(graph.knows, trace.env.needed))
    if refuses is not None:
        values[refuses] = graph.refusing(values[refuses], needed)
        key.append(values[refuses])
    elif needed:
        first = next(iter(values))
        values[first] = graph.stopping(values[first], needed)
        key.append(values[first])
    if WAY in outputs:
        values[WAY] = graph.constant(np.array(number))
        infos[WAY] = helper.make_tensor_value_info(WAY, onnx.TensorProto.INT64, [])
    asked = [graph.asked(question.condition, question.answer) for question in questions]
    return Way(
        tuple(key),
        [answer for _, answer in asked],
        [question.line for question in questions],
        [answer != question.answer for (_, answer), question in zip(asked, questions, strict=True)],
        [condition for condition, _ in asked],
        values,
        infos,
    )


def _results(trace: Trace, graph: Graph, outputs: Collection[str]) -> dict[str, Value]:
    """The outputs' values, with all that they and what was asked of data need in the graph."""
    nodes: list[fx.Node] = list(trace.graph.graph.nodes)
    ends = dict(zip(trace.outputs, nodes[-1].args[0], strict=True))  # type: ignore[arg-type]
    env = trace.env
    known = (*env.needed, *(question.condition for question in env.questions))
    asked = {symbol for each in known for symbol in each.free_symbols}
    placed = (node for node in nodes if node.op == "placeholder")
    given = {
        node: value_of(name, node.meta["val"])
        for name, node in zip(trace.inputs, placed, strict=True)
    }
    for value in given.values():
        graph.shapes.setdefault(value.name, value.shape)
    live = nodes_behind({ends[name] for name in outputs} | _deciding(nodes, asked))
    values = Walk(trace.graph, graph, given, probabilities(nodes)).lower(live)
    return {name: values[ends[name]] for name in outputs}


def _deciding(nodes: Sequence[fx.Node], symbols: Collection[sympy.Symbol]) -> set[fx.Node]:
    """The nodes that these symbols come from: the first that each of them occurs at."""
    left, found = set(symbols), set()
    for node in nodes:
        new = left & symbols_in(node.meta.get("val")) if left else left
        if new:
            found.add(node)
            left -= new
    return found


def _simplified(graph: Graph, ways: Sequence[Way]) -> list[Way]:
    """The ways in the graph made simpler."""
    ends = {
        (number, part, place): name
        for number, way in enumerate(ways)
        for part, names in (("value", way.values), ("condition", dict(enumerate(way.conditions))))
        for place, name in names.items()
    }
    left = simplify(graph, ends)
    return [
        replace(
            way,
            conditions=[left[number, "condition", i] for i in range(len(way.conditions))],
            values={name: left[number, "value", name] for name in way.values},
        )
        for number, way in enumerate(ways)
    ]


def _output(name: str, value: Value, symbols: Mapping[sympy.Symbol, str]) -> onnx.ValueInfoProto:
    sizes: list[int | str | None] = []
    for size in value.shape:
        part = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        sizes.append(int(part) if part.is_Integer else symbols.get(part))
    return helper.make_tensor_value_info(name, ONNX_DTYPE[value.dtype], sizes)


# Nodes that move nothing, or that do in several steps what one does.
#
# A node costs onnxruntime about 1 us whatever it computes, and a small step is 150 of them. What is
# left out here changes no bit of a result: a Reshape to the shape that is there, the axes of size 1
# that a sum keeps and a Reshape takes away, and arithmetic on each part of a pack that could be on
# the whole of it (batch norm's running statistics and counters).

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


# Whether a second thread pays: whether a step's products are large beside what it scatters.
#
# onnxruntime's ScatterND that adds races under several threads, so a graph with it runs with one.
# ScatterElements adds in one fixed order at any number of threads, and takes 5 to 30 times as long
# (0.25 against 0.04 ms for 512 rows of 128). It is the better choice only where it takes little of
# the step.

aten = torch.ops.aten

LEAST_OPERATIONS = 1e8
"""Of a step's products, about 1 ms of one core: below, threads cost more than they bring."""

OPERATIONS_A_SCATTERED_ELEMENT = 2e4
"""About 200 ns of products for the 4 to 10 ns that ScatterElements takes."""

_ROWS_OF: dict[Any, int] = {
    aten.embedding_dense_backward.default: 0,
    aten.index_add.default: 3,
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
}


def several_threads_pay(nodes: Iterable[fx.Node]) -> bool:
    """Whether these nodes' products, at the traced sizes, outweigh an order-fixed scatter."""
    operations, scattered = 0.0, 0.0
    for node in nodes:
        if node.op != "call_function":
            continue
        operations += _operations(node)
        place = _ROWS_OF.get(node.target)
        if place is not None:
            scattered += _elements(node.args[place])
    return operations >= max(LEAST_OPERATIONS, OPERATIONS_A_SCATTERED_ELEMENT * scattered)


def _operations(node: fx.Node) -> float:
    """Two for each multiplication and addition of a matrix product or convolution."""
    target: Any = node.target
    if target in (aten.mm.default, aten.bmm.default):
        return 2 * _elements(node) * _sizes(node.args[0])[-1]
    if target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * _elements(node) * _sizes(node.args[1])[-1]
    if target is aten.convolution.default:
        return 2 * _elements(node) * math.prod(_sizes(node.args[1])[1:])
    if target is aten.convolution_backward.default:
        return 4 * _elements(node.args[0]) * math.prod(_sizes(node.args[2])[1:])
    return 0.0


def _elements(node: Any) -> float:
    return float(math.prod(_sizes(node)))


def _sizes(node: Any) -> list[int]:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if not isinstance(value, Tensor):
        return [0]
    # A hint says what was traced, and assumes nothing of the axis.
    return [s.node.hint or 1 if isinstance(s, torch.SymInt) else s for s in value.shape]
