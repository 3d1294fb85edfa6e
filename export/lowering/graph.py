"""A small builder of ONNX graphs: named values, shared constants, symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx
import sympy
import torch
from onnx import TensorProto, helper, numpy_helper

from export.errors import ExportError
from export.insides import torch_sympy
from export.symbols import Dim, expression, never_negative, same_shape

# What can be asked of ONNX nodes: equality, names, and which of them are needed.


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


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The graph's nodes and those of its branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from every_node(attribute.g)


def live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    needed = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed.intersection(name for name in node.output if name):
            kept.append(node)
            needed |= used_names([node])
    kept.reverse()
    return kept


def without_indices(nodes: Iterable[onnx.NodeProto], used: Collection[str]) -> None:
    """Leave out a maximum's indices that nobody asks for: they are ten times its work."""
    for node in nodes:
        if node.op_type == "MaxPool" and len(node.output) > 1 and node.output[1] not in used:
            del node.output[1]
            node.name = ""


# Symbolic sizes as nodes that compute them at run time.

_ARITHMETIC: tuple[tuple[Any, str], ...] = (
    (sympy.Add, "Add"),
    (sympy.Mul, "Mul"),
    (torch_sympy.FloorDiv, "Div"),
    (torch_sympy.CleanDiv, "Div"),
    (torch_sympy.PythonMod, "Mod"),
    (torch_sympy.Mod, "Mod"),
    (sympy.Max, "Max"),
    (torch_sympy.Max, "Max"),
    (sympy.Min, "Min"),
    (torch_sympy.Min, "Min"),
)


_REAL_ARITHMETIC: tuple[tuple[Any, str], ...] = (
    (sympy.Add, "Add"),
    (sympy.Mul, "Mul"),
    (sympy.Pow, "Pow"),
    (torch_sympy.IntTrueDiv, "Div"),
    (torch_sympy.FloatTrueDiv, "Div"),
    (torch_sympy.FloatPow, "Pow"),
    (torch_sympy.Max, "Max"),
    (torch_sympy.Min, "Min"),
)


_COMPARISONS: tuple[tuple[Any, str], ...] = (
    (sympy.Eq, "Equal"),
    (sympy.StrictLessThan, "Less"),
    (sympy.LessThan, "LessOrEqual"),
    (sympy.StrictGreaterThan, "Greater"),
    (sympy.GreaterThan, "GreaterOrEqual"),
)


_FUNCTIONS = {
    "Abs": "Abs",
    **{f"OpaqueUnaryFn_{n.lower()}": n for n in ("Exp", "Log", "Sqrt", "Sin", "Cos", "Tanh")},
}


_ROUNDING: tuple[tuple[Any, str], ...] = (
    (torch_sympy.TruncToInt, ""),
    (torch_sympy.FloorToInt, "Floor"),
    (torch_sympy.CeilToInt, "Ceil"),
    (torch_sympy.RoundToInt, "Round"),
)


# Inputs that are all at least 0 where a node's whole numbers are: of a range, its start and step.
_SIGNED_BY: Mapping[str, slice] = {
    **dict.fromkeys(("Add", "Mul", "Div", "Max", "Min", "Concat"), slice(None)),
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose"), slice(1)),
    **dict.fromkeys(("Cast", "Slice", "Tile", "Gather", "GatherElements", "Identity"), slice(1)),
    "Range": slice(0, None, 2),
    "Mod": slice(1, 2),
    "Where": slice(1, 3),
}


def _is_whole(expr: sympy.Expr) -> bool:
    if isinstance(expr, sympy.Symbol):
        return bool(expr.is_integer)
    whole = (sympy.Abs, *(kind for kind, _ in _ARITHMETIC))
    return isinstance(expr, whole) and all(part.is_Integer or _is_whole(part) for part in expr.args)


def _folded(
    graph: Graph, expr: sympy.Expr, parts: list[str], kinds: Sequence[tuple[Any, str]]
) -> str | None:
    """The parts joined by the expression's operator, where it is one of these kinds."""
    for kind, op_type in kinds:
        if isinstance(expr, kind):
            return reduce(partial(graph.op, op_type), parts)
    return None


def whole(graph: Graph, expr: sympy.Expr) -> str:
    """A size as an int64 tensor of shape [1].

    Raises ExportError where it depends on data or has no exact integer form.
    """
    number = graph.number(expr, torch.int64)
    if number is not None:
        return number
    if isinstance(expr, sympy.Symbol):
        where = graph.place_of(expr)
        if where is None:
            raise ExportError(
                f"a size ({expr}) depends on data, not on a named axis",
                instead="fixed sizes, or a mask instead of a selection",
            )
        return graph.op("Shape", where[0], start=where[1], end=where[1] + 1)
    for kind, rounding in _ROUNDING:
        if isinstance(expr, kind):
            real = fraction(graph, expr.args[0])
            return graph.op(
                "Cast", graph.op(rounding, real) if rounding else real, to=TensorProto.INT64
            )
    parts = [graph.size(part) for part in expr.args]
    if isinstance(expr, torch_sympy.FloorDiv) and graph.has_numbers(expr.args[0]):
        # ONNX's quotient is rounded towards 0.
        parts[0] = graph.op("Sub", parts[0], graph.op("Mod", *parts))
    result = _folded(graph, expr, parts, _ARITHMETIC)
    if result is not None:
        return result
    if isinstance(expr, sympy.Abs):
        return graph.op("Abs", parts[0])
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
        return reduce(partial(graph.op, "Mul"), [parts[0]] * int(expr.exp))
    raise ExportError(
        f"a size is computed as {expr}, which has no exact integer form in the graph",
        instead="sizes that are sums, products or whole quotients of the named axes",
    )


def fraction(graph: Graph, expr: sympy.Expr) -> str:
    """A size expression with real quotients, as a float64 tensor of shape [1]."""
    if expr.is_number:
        return graph.constant(np.asarray([float(expr)], dtype=np.float64))
    number = graph.number(expr, torch.float64)
    if number is not None:
        return number
    if _is_whole(expr):
        return graph.op("Cast", graph.size(expr), to=TensorProto.DOUBLE)
    parts = [fraction(graph, part) for part in expr.args]
    result = _folded(graph, expr, parts, _REAL_ARITHMETIC)
    if result is not None:
        return result
    if isinstance(expr, torch_sympy.ToFloat):
        return parts[0]
    name = type(expr).__name__
    if name == "OpaqueUnaryFn_log2":
        logarithm = graph.op("Log", parts[0])
        return graph.op("Mul", logarithm, graph.constant(np.asarray([1 / math.log(2)])))
    if name in _FUNCTIONS:
        return graph.op(_FUNCTIONS[name], parts[0])
    raise ExportError(
        f"a number is computed from sizes as {expr}, which has no form in the graph",
        instead="sums, products, quotients, powers and roots of the named axes",
    )


OPSET = 20
IR_VERSION = 9

ONNX_DTYPE: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
NUMPY_DTYPE: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in ONNX_DTYPE
}


@dataclass(frozen=True)
class Value:
    """A tensor of the graph as a lowering sees it: its name, dtype and (symbolic) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)


Tensorish = Value | str
Number = int | float | bool
Scalar = Number | torch.SymInt | torch.SymFloat


class Graph:
    """Collects nodes and constants; ``child`` makes the body of a control-flow operator.

    ``several_threads`` asks for sums that are the same at any number of threads.
    """

    def __init__(self, parent: Graph | None = None, *, several_threads: bool = False) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.producer: dict[str, onnx.NodeProto] = {}
        self._equal: dict[Hashable, tuple[str, ...]] = {}
        self._root: Graph = parent._root if parent else self
        self.several_threads = several_threads
        if parent is None:
            self._initializers: dict[str, onnx.TensorProto] = {}
            self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
            self._arrays: dict[str, np.ndarray[Any, Any]] = {}
            self._count = 0
            self._symbols: dict[sympy.Symbol, tuple[str, int]] = {}
            self._numbers: dict[sympy.Symbol, Value] = {}
            self._from_zero: dict[str, Value] = {}
            self._lengths: dict[sympy.Expr, None] = {}
        self.shapes: dict[str, tuple[Dim, ...]] = {}
        """Of the values that stand for a recorded operator's result; others are not known."""
        self._dims: dict[sympy.Expr, str] = {}
        self._shapes: dict[tuple[sympy.Expr, ...], str] = {}

    # --- values -----------------------------------------------------------------------------

    def name(self, hint: str) -> str:
        """A fresh value name."""
        self._root._count += 1
        return f"{hint}_{self._root._count}"

    def op(self, op_type: str, *inputs: Tensorish | None, **attributes: Any) -> str:
        """Add a node with one output; a ``None`` input is an absent optional one."""
        return self.multi(op_type, *inputs, outputs=1, **attributes)[0]

    def multi(
        self, op_type: str, *inputs: Tensorish | None, outputs: int | Sequence[bool], **attrs: Any
    ) -> tuple[str, ...]:
        """Add a node with several outputs; a False in ``outputs`` leaves that output out.

        Equal nodes are one node: every operator in use is a function of its inputs.
        """
        wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
        given = {key: value for key, value in attrs.items() if value is not None}
        sources = [_name(value) for value in inputs]
        # Absent optional inputs at the end are left out: OpenVINO takes a name "" for an input.
        while sources and not sources[-1]:
            sources.pop()
        key = same_node(op_type, sources, wanted, given)
        if key is not None and key in self._equal:
            return self._equal[key]
        names = [self.name(op_type.lower()) if want else "" for want in wanted]
        node = helper.make_node(op_type, sources, names, **given)
        # A name by which a device can leave it to the CPU, where another provider cannot run it.
        if len(names) > 1:
            node.name = next(name for name in names if name)
        if key is not None:
            self._equal[key] = tuple(names)
        self.nodes.append(node)
        for name in names:
            if name:
                self.producer[name] = node
        return tuple(names)

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """An initialiser, shared between equal constants."""
        array = np.array(array, order="C")
        root = self._root
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in root._constants:
            name = self.name("const")
            root._constants[key] = name
            root._arrays[name] = array
            root._initializers[name] = numpy_helper.from_array(array, name)
        return root._constants[key]

    def array(self, value: Tensorish) -> np.ndarray[Any, Any] | None:
        """The constant behind a value, or None where it is computed."""
        return self._root._arrays.get(_name(value))

    def scalar(self, value: Scalar, dtype: torch.dtype) -> str:
        """A 0-d number: a constant, or computed where it depends on an axis."""
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expr = value.node.expr
            if not expr.is_number:
                computed = (
                    self.size(expr) if isinstance(value, torch.SymInt) else fraction(self, expr)
                )
                return self.cast(self.op("Squeeze", computed, self.ints([0])), dtype)
            value = int(expr) if expr.is_Integer else float(expr)
        return self.constant(np.asarray(value, dtype=NUMPY_DTYPE[dtype]))

    def ints(self, values: Iterable[int]) -> str:
        """A 1-d int64 constant."""
        return self.constant(np.asarray(list(values), dtype=np.int64))

    def cast(self, value: Tensorish, dtype: torch.dtype) -> str:
        """The value in ``dtype``; nothing is added where it already has it."""
        if isinstance(value, Value) and value.dtype == dtype:
            return value.name
        known = self.array(value)
        if known is not None:
            return self.constant(known.astype(NUMPY_DTYPE[dtype]))
        return self.op("Cast", value, to=ONNX_DTYPE[dtype])

    # --- sizes ------------------------------------------------------------------------------

    def bind_symbol(self, symbol: sympy.Symbol, input_name: str, axis: int) -> None:
        """Where a symbolic size is read from at run time."""
        self._root._symbols.setdefault(symbol, (input_name, axis))

    def bind_number(self, symbol: sympy.Symbol, value: Value) -> None:
        """The tensor of one element that a Python number is read from at run time."""
        self._root._numbers.setdefault(symbol, value)

    def number(self, expr: sympy.Expr, dtype: torch.dtype) -> str | None:
        """A Python number that was read from a tensor, as [1]; None of other expressions."""
        value = self._root._numbers.get(expr)
        if value is None:
            return None
        return self.op("Reshape", self.cast(value, dtype), self.ints([1]))

    def has_numbers(self, size: sympy.Expr) -> bool:
        """Whether a number that was read from a tensor is part of it: one below 0, perhaps."""
        return not self._root._numbers.keys().isdisjoint(size.free_symbols)

    def knows(self, size: sympy.Expr) -> bool:
        """Whether the graph can compute a size: all that it depends on has been bound."""
        return all(each in self._symbols or each in self._numbers for each in size.free_symbols)

    def place_of(self, symbol: sympy.Symbol) -> tuple[str, int] | None:
        """The input and the axis of it that a symbolic size is read from."""
        return self._root._symbols.get(symbol)

    def dim(self, size: Dim) -> str:
        """A size as an int64 tensor of shape [1]."""
        return self.size(expression(size))

    def shape(self, sizes: Sequence[Dim]) -> str:
        """A shape as an int64 tensor of shape [rank]; a constant where every size is fixed."""
        key = tuple(expression(size) for size in sizes)
        if all(part.is_Integer for part in key):
            return self.ints(int(part) for part in key)
        if key not in self._shapes:
            self._shapes[key] = self.op("Concat", *[self.size(part) for part in key], axis=0)
        return self._shapes[key]

    def target(self, sizes: Sequence[Dim]) -> str:
        """A shape for Reshape: one size that depends on an axis becomes -1, so it stays constant.

        A fixed 0 would read as "copy" and -1 beside a 0 as undefined, so those go the long way.
        """
        key = [expression(size) for size in sizes]
        free = [i for i, part in enumerate(key) if not part.is_Integer]
        if len(free) == 1 and not any(part == 0 for part in key):
            return self.ints(-1 if i in free else int(part) for i, part in enumerate(key))
        return self.shape(sizes)

    def reshape(self, value: Tensorish, sizes: Sequence[Dim]) -> str:
        """The value with another shape of as many elements."""
        if isinstance(value, Value) and same_shape(value.shape, sizes):
            return value.name
        return self.op("Reshape", value, self.target(sizes))

    def full(self, sizes: Sequence[Dim], value: Scalar, dtype: torch.dtype) -> str:
        """A tensor filled with one number (an Expand, which elementwise lowerings see through)."""
        scalar = self.scalar(value, dtype)
        if not sizes:
            return scalar
        return self.op("Expand", scalar, self.shape(sizes))

    def zeros(self, sizes: Sequence[Dim], dtype: torch.dtype) -> str:
        """A buffer of zeros, for a scatter to add into."""
        fill = helper.make_tensor("value", ONNX_DTYPE[dtype], [1], [0])
        return self.op("ConstantOfShape", self.shape(sizes), value=fill)

    def size(self, expr: sympy.Expr) -> str:
        """A size expression as an int64 tensor of shape [1], computed once."""
        if expr.is_Integer:
            return self.ints([int(expr)])
        if expr not in self._dims:
            self._dims[expr] = whole(self, expr)
        return self._dims[expr]

    # --- indices ----------------------------------------------------------------------------

    def from_zero(self, index: Value) -> None:
        """Note an index that counts from 0 up: where torch raises for -1, ONNX takes the last.

        One that is beyond either end onnxruntime refuses by itself, as torch does.
        """
        producer = self.producer.get(index.name)
        if producer is not None and producer.op_type in ("Max", "Clip"):
            bounds = [self.array(name) for name in producer.input[:2]]
            if any(bound is not None and bool((bound >= 0).all()) for bound in bounds):
                return
        self._root._from_zero[index.name] = index

    def at_least_zero(self, length: sympy.Expr) -> None:
        """Note a length that torch raises for below 0, and ONNX takes for 0."""
        if not never_negative(length) or self.has_numbers(length):
            self._root._lengths[length] = None

    def begin_way(self) -> None:
        """What refuses a step is noted anew: another recording of the same step begins."""
        self._from_zero.clear()
        self._lengths.clear()

    def asked(self, condition: sympy.Basic, answer: bool) -> tuple[str, bool]:
        """A condition as ``truth`` gives it, without negations, and the answer to that."""
        name = self.truth(condition)
        while name in self.producer and self.producer[name].op_type == "Not":
            name, answer = self.producer[name].input[0], not answer
        return name, answer

    def truth(self, condition: sympy.Basic) -> str:
        """A condition on sizes and numbers that data decide, as a bool tensor of shape [].

        Raises ExportError where it has no form in the graph.
        """
        read = self._root._numbers.get(condition.args[0])
        if condition == sympy.Eq(condition.args[0], 1) and read and read.dtype == torch.bool:
            return self.reshape(read, ())
        if isinstance(condition, (sympy.Not, sympy.Ne)):
            return self.op("Not", self.truth(sympy.Not(condition)))
        if isinstance(condition, (sympy.And, sympy.Or)):
            op_type = "And" if isinstance(condition, sympy.And) else "Or"
            return reduce(partial(self.op, op_type), [self.truth(part) for part in condition.args])
        for kind, op_type in _COMPARISONS:
            if isinstance(condition, kind):
                sides = condition.args
                exact = all(side.is_integer for side in sides)
                values = [self.size(side) if exact else fraction(self, side) for side in sides]
                return self.op("Reshape", self.op(op_type, *values), self.ints([]))
        raise ExportError(
            f"a branch on {condition}, which has no form in the graph",
            instead="comparisons of numbers, with sums, products and quotients of them",
        )

    def stopping(self, value: str, sizes: Iterable[sympy.Expr]) -> str:
        """The value; onnxruntime stops, at a row that is not there, where a size is below 0."""
        least = self.op("Min", *[self.size(size) for size in sizes], self.ints([0]))
        nothing = self.op("Gather", self.ints([0]), self.op("Mul", least, self.ints([2])))
        return self.op("Reshape", value, self.op("Add", self.op("Shape", value), nothing))

    def refusing(self, guard: str, sizes: Iterable[sympy.Expr] = ()) -> str:
        """The guard, or NaN where an index from 0 up, a length or a size is below 0."""
        least = [
            self.cast(Value(self.op("ReduceMin", index, keepdims=0), index.dtype, ()), torch.int64)
            for index in self._from_zero.values()
            if self._may_fall_below_zero(index.name)
        ]
        least += [
            self.op("Squeeze", self.size(each), self.ints([0])) for each in (*self._lengths, *sizes)
        ]
        if not least:
            return guard
        lowest = self.op("Min", *least) if len(least) > 1 else least[0]
        below = self.op("Less", lowest, self.scalar(0, torch.int64))
        return self.op("Where", below, self.scalar(math.nan, torch.float32), guard)

    def _may_fall_below_zero(self, name: str) -> bool:
        """Whether an index depends on the batch, or on sizes in a way that may make it negative."""
        queue, seen, sized = [name], {name}, False
        while queue:
            current = queue.pop()
            producer = self.producer.get(current)
            if producer is None and current.startswith("batch."):
                return True
            if producer is not None and producer.op_type == "Shape":
                sized = True
            elif producer is not None:
                queue += used_names([producer]) - seen
                seen |= used_names([producer])
        return sized and not self._never_negative(name)

    def _never_negative(self, name: str) -> bool:
        """Whether a value of whole numbers is at least 0 by how it is made, at any size."""
        producer = self.producer.get(name)
        if producer is None:
            known = self.array(name)
            return known is not None and bool((known >= 0).all())
        positions = _SIGNED_BY.get(producer.op_type)
        if positions is None:
            return producer.op_type in ("Shape", "Size", "Abs", "ArgMax", "ArgMin", "NonZero")
        return all(self._never_negative(each) for each in producer.input[positions])

    # --- results ----------------------------------------------------------------------------

    def rename_outputs(self, outputs: Mapping[str, str]) -> None:
        """Give values their names as graph outputs; one that cannot be renamed is copied."""
        new_name: dict[str, str] = {}
        for output, value in outputs.items():
            if value in self.producer and value not in new_name:
                new_name[value] = output
            else:
                self.nodes.append(helper.make_node("Identity", [value], [output]))
        for node in self.nodes:
            rename(node, new_name)

    def taken_out(self) -> list[onnx.NodeProto]:
        """The nodes, for a pass that puts back what it keeps: the graph has none now."""
        nodes, self.nodes = self.nodes, []
        self._equal.clear()
        return nodes

    def child(self) -> Graph:
        """The body of a Scan, Loop or If: shares names and constants with this graph."""
        return Graph(parent=self)

    def body(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.GraphProto:
        """This child graph as an attribute value."""
        return helper.make_graph(self.nodes, name, list(inputs), list(outputs))

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        *,
        metadata: Mapping[str, str],
    ) -> onnx.ModelProto:
        """The finished model: only what the outputs need, in default-domain operators."""
        nodes = live_nodes(self.nodes, [output.name for output in outputs])
        used = used_names(nodes) | {output.name for output in outputs}
        without_indices(nodes, used)
        constants = [t for n, t in self._root._initializers.items() if n in used]
        graph = helper.make_graph(nodes, name, list(inputs), list(outputs), constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = IR_VERSION
        model.producer_name = "tessera"
        helper.set_model_props(model, dict(metadata))
        return model


def _name(value: Tensorish | None) -> str:
    if value is None:
        return ""
    return value.name if isinstance(value, Value) else value
