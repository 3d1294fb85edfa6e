"""A recorded aten graph to an ONNX model in default-domain operators."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import sympy
import torch
from onnx import helper
from torch import fx

import export.lowering  # noqa: F401  (fills the registry)
from export.errors import ExportError
from export.insides import GuardOnDataDependentSymNode, OpOverload, tree_map
from export.lowering import registry
from export.lowering.graph import (
    NUMPY_DTYPE,
    ONNX_DTYPE,
    Graph,
    Value,
    expression,
    used_names,
)
from export.lowering.probabilities import probabilities, sigmoid
from export.lowering.simplify import simplify
from export.lowering.ways import Way, chosen, said, tree_of
from export.mutation import live_nodes
from export.origins import of
from export.sizes import symbols_in
from export.threads import several_threads_pay
from export.trace import Trace

# What to use instead of an operator that cannot be exported.

_HINTS: tuple[tuple[str, str], ...] = (
    ("replication_pad", "torch.cat of the edge slices, or padding mode 'reflect' or 'constant'"),
    ("as_strided", "slices, reshape or Tensor.unfold"),
    ("mode", "counts by one_hot and sum, then argmax"),
    ("erfc", "1 - torch.erf(x)"),
    ("erfinv", "values computed before the step, given as a batch input"),
    ("gamma", "values computed before the step, given as a batch input"),
    ("hypot", "torch.sqrt(x * x + y * y)"),
    ("copysign", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("signbit", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("fake_quant", "torch.fake_quantize_per_tensor_affine or ..._per_channel_affine"),
    ("put", "gather, or indexing of the flattened tensor"),
    ("complex", "two tensors, the real and the imaginary part"),
    ("grid_sampler", "torch.nn.functional.grid_sample"),
    ("upsample", "torch.nn.ConvTranspose2d, or repeat_interleave by reshape and expand"),
    ("linalg", "products and sums; decompositions belong outside the step"),
    ("svd", "products and sums; decompositions belong outside the step"),
    ("fft", "torch.nn.Conv1d with fixed weights"),
    ("nonzero", "torch.where, or multiplying by a mask"),
    ("masked_select", "torch.where, or multiplying by a mask"),
    ("unique", "distinct values found before the step, given as a batch input"),
    ("_embedding_bag", "torch.nn.EmbeddingBag with mode sum or mean"),
    ("_thnn", "torch.nn.GRU or torch.nn.LSTM"),
    ("rnn", "torch.nn.GRU or torch.nn.LSTM"),
)


def instead_of(operator: str) -> str:
    """A hint for the operator's name, with a general one where none fits."""
    for part, hint in _HINTS:
        if part in operator:
            return hint
    return "other operators (`tessera-export operators` lists those that can be exported)"


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
    results = _Lowering(trace, graph).run(set(wanted))
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


class _Lowering:
    """Walks the aten graph once, in order, lowering what the outputs need."""

    def __init__(self, trace: Trace, graph: Graph) -> None:
        self._trace = trace
        self._graph = graph
        self._values: dict[fx.Node, Any] = {}
        self._probabilities: set[fx.Node] = set()

    def run(self, outputs: set[str]) -> dict[str, Value]:
        gm = self._trace.graph
        nodes = list(gm.graph.nodes)
        self._probabilities = probabilities(nodes)
        final = nodes[-1].args[0]
        ends = dict(zip(self._trace.outputs, final, strict=True))
        env = self._trace.env
        known = (*env.needed, *(question.condition for question in env.questions))
        asked = {symbol for each in known for symbol in each.free_symbols}
        live = live_nodes({ends[name] for name in outputs} | _deciding(nodes, asked))
        names = iter(self._trace.inputs)
        for node in nodes:
            if node.op == "placeholder":
                input_name = next(names)
                self._values[node] = self._named(input_name, node.meta["val"])
            elif node not in live or node.op == "output":
                continue
            elif node.op == "get_attr":
                self._values[node] = self._attribute(node)
            elif isinstance(node.meta.get("val"), _NUMBERS):
                self._values[node] = node.meta["val"]
                if node.target is torch.ops.aten._local_scalar_dense.default:
                    for symbol in symbols_in(node.meta["val"]):
                        self._graph.bind_number(symbol, self._values[node.args[0]])
            else:
                self._values[node] = self._node(node)
        return {name: self._values[node] for name, node in ends.items() if name in outputs}

    def _attribute(self, node: fx.Node) -> Value:
        return self._constant(node, getattr(self._trace.graph, str(node.target)))

    def _constant(self, node: fx.Node, tensor: torch.Tensor) -> Value:
        try:
            array = tensor.detach().numpy()
        except Exception as error:
            raise ExportError(
                "a constant tensor of the model has no values while tracing",
                module=of(node).module,
                line=of(node).line,
                instead="register_buffer for tensors that the model holds",
            ) from error
        return Value(
            self._graph.constant(array.astype(NUMPY_DTYPE[tensor.dtype])),
            tensor.dtype,
            tuple(tensor.shape),
        )

    def _node(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            source, index = node.args
            chosen = self._values[source][index]  # type: ignore[index]
            if chosen is None:
                raise ExportError(
                    "a result is used that the exporter does not compute",
                    operator=str(source.target) if isinstance(source, fx.Node) else "",
                    module=of(node).module,
                    line=of(node).line,
                )
            return chosen
        function = registry.find(_functional(target))
        if node in self._probabilities:
            function = sigmoid
        if function is None:
            constants = self._evaluated(node)
            if constants is not None:
                return constants
            raise ExportError(
                "no lowering for this operator",
                operator=str(target),
                module=of(node).module,
                line=of(node).line,
                instead=instead_of(str(target)),
            )
        out = node.meta["val"]
        self._check_dtypes(node, out)
        args = fx.map_arg(node.args, lambda n: self._values[n])
        kwargs = fx.map_arg(dict(node.kwargs), lambda n: self._values[n])
        try:
            result = function(self._graph, out, *args, **kwargs)
        except ExportError as error:
            origin = of(node)
            raise error.at(origin.module, origin.line, operator=str(target)) from error
        except GuardOnDataDependentSymNode as error:
            raise ExportError(
                "a number that depends on data stands where the operator takes a fixed one",
                operator=str(target),
                module=of(node).module,
                line=of(node).line,
                instead="the tensor itself, with operators that take it (x * scale)",
            ) from error
        except (TypeError, KeyError, ValueError, ArithmeticError, IndexError) as error:
            raise ExportError(
                f"this use of the operator is not supported ({error})",
                operator=str(target),
                module=of(node).module,
                line=of(node).line,
                instead=instead_of(str(target)),
            ) from error
        self._bind_sizes(result, out)
        if isinstance(result, (tuple, list)):
            return tuple(
                None if name is None or name == "" else self._named(name, part)
                for name, part in zip(result, out, strict=False)
            )
        return self._named(result, out)

    def _named(self, name: str, fake: Any) -> Value:
        value = _value(name, fake)
        self._graph.shapes.setdefault(name, value.shape)
        return value

    def _evaluated(self, node: fx.Node) -> Any:
        """What torch computes of constants alone; None where an input or a free size comes in."""
        needed = live_nodes({node})
        if not all(_is_constant(one) for one in needed):
            return None
        self._check_dtypes(node, node.meta["val"])
        found: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for one in (each for each in self._trace.graph.graph.nodes if each in needed):
                if one.op == "get_attr":
                    found[one] = getattr(self._trace.graph, str(one.target))
                else:
                    args, kwargs = fx.map_arg((one.args, dict(one.kwargs)), found.__getitem__)
                    found[one] = _functional(one.target)(*args, **kwargs)
        return tree_map(lambda tensor: self._constant(node, tensor), found[node])

    def _bind_sizes(self, result: Any, out: Any) -> None:
        """Say where the sizes stand that data decide (of ``nonzero``)."""
        several = isinstance(result, (tuple, list))
        pairs = zip(result, out, strict=False) if several else [(result, out)]
        for name, part in pairs:
            for axis, size in enumerate(part.shape if name else ()):
                symbol = expression(size)
                if isinstance(symbol, sympy.Symbol):
                    self._graph.bind_symbol(symbol, name, axis)

    def _check_dtypes(self, node: fx.Node, out: Any) -> None:
        for part in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(part, torch.Tensor) and part.dtype not in ONNX_DTYPE:
                raise ExportError(
                    f"dtype {part.dtype} is not supported",
                    operator=str(node.target),
                    module=of(node).module,
                    line=of(node).line,
                    instead="float32 or int64: no autocast, no .half(), no complex numbers",
                )


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _deciding(nodes: Sequence[fx.Node], symbols: Collection[sympy.Symbol]) -> set[fx.Node]:
    """The nodes that these symbols come from: the first that each of them occurs at."""
    left, found = set(symbols), set()
    for node in nodes:
        new = left & symbols_in(node.meta.get("val")) if left else left
        if new:
            found.add(node)
            left -= new
    return found


def _value(name: str, fake: Any) -> Value:
    if fake.dtype not in ONNX_DTYPE:
        raise ExportError(f"dtype {fake.dtype} is not supported", instead="float32 or int64")
    return Value(name, fake.dtype, tuple(fake.shape))


def _is_constant(node: fx.Node) -> bool:
    """Whether a node, of constants, is one: no input or free size, not random, and no write."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    target = _functional(node.target)
    return (
        isinstance(target, OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
    )


def _functional(target: Any) -> Any:
    """The out-of-place overload of an in-place operator; any other operator unchanged."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    name = schema.name.split("::")[1]
    if not name.endswith("_"):
        return target
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, target)
