"""A recorded aten graph to an ONNX model in default-domain operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import sympy
import torch
from onnx import helper
from torch import fx

import export.lowering  # noqa: F401  (fills the registry)
from export.lowering.graph import ONNX_DTYPE, Graph, Value, used_names
from export.lowering.simplify import simplify
from export.lowering.walk import Walk, value_of
from export.lowering.ways import Way, chosen, said, tree_of
from export.mutation import live_nodes
from export.symbols import symbols_in
from export.threads import several_threads_pay
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
    live = live_nodes({ends[name] for name in outputs} | _deciding(nodes, asked))
    values = Walk(trace.graph, graph, given).lower(live)
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
