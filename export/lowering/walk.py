"""A recorded graph of aten operators, lowered node by node into a graph of ONNX nodes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from export.errors import ExportError
from export.insides import GuardOnDataDependentSymNode, OpOverload, tree_map
from export.lowering import registry
from export.lowering.graph import NUMPY_DTYPE, ONNX_DTYPE, Graph, Value
from export.mutation import nodes_behind
from export.origins import of
from export.symbols import expression, symbols_in

# What to use instead of an operator that cannot be exported.

_HINTS: tuple[tuple[str, str], ...] = (
    ("replication_pad", "torch.cat of the edge slices, or padding mode 'reflect' or 'constant'"),
    ("as_strided", "slices, reshape or Tensor.unfold"),
    ("mode", "counts by one_hot and sum, then argmax"),
    ("erfc", "1 - torch.erf(x)"),
    ("erfinv", "values computed before the step, given as a batch input"),
    ("[a-z]*gammac?", "values computed before the step, given as a batch input"),
    ("hypot", "torch.sqrt(x * x + y * y)"),
    ("copysign", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("signbit", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("fake_quantize[a-z]*", "torch.fake_quantize_per_tensor_affine or ..._per_channel_affine"),
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
    for name, hint in _HINTS:
        if re.search(rf"(?<![a-z]){name}(?![a-z])", operator):
            return hint
    return "other operators (`tessera-export operators` lists those that can be exported)"


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Walk:
    """Lowers a module's nodes, in order, into a graph.

    ``values``: of the nodes that stand for what goes in, before; of all that is live, after.
    ``likely``: the sigmoids that are read as probabilities.
    """

    module: fx.GraphModule
    graph: Graph
    values: dict[fx.Node, Any]
    likely: Collection[fx.Node] = ()

    def lower(self, live: Collection[fx.Node]) -> Mapping[fx.Node, Any]:
        """The values of these nodes. Raises ExportError for what cannot be lowered."""
        for node in self.module.graph.nodes:
            if node.op == "output" or node not in live or node in self.values:
                continue
            try:
                self.values[node] = self._value(node, sigmoid if node in self.likely else None)
            except ExportError as error:
                origin, named = of(node), "" if node.op == "get_attr" else str(node.target)
                raise error.at(origin.module, origin.line, operator=named) from error
        return self.values

    def _value(self, node: fx.Node, instead: Callable[..., Any] | None) -> Any:
        if node.op == "get_attr":
            return self._constant(getattr(self.module, str(node.target)))
        made = node.meta.get("val")
        if isinstance(made, _NUMBERS):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                for symbol in symbols_in(made):
                    self.graph.bind_number(symbol, self.values[node.args[0]])  # type: ignore[index]
            return made
        if node.target is operator.getitem:
            source, index = node.args
            chosen = self.values[source][index]  # type: ignore[index]
            if chosen is None:
                raise ExportError(
                    "a result is used that the exporter does not compute",
                    operator=str(getattr(source, "target", "")),
                )
            return chosen
        function = instead or registry.find(functional(node.target))
        if function is None:
            return self._evaluated(node)
        return self._lowered(node, function)

    def _constant(self, tensor: torch.Tensor) -> Value:
        try:
            array = tensor.detach().numpy()
        except Exception as error:
            raise ExportError(
                "a constant tensor of the model has no values while tracing",
                instead="register_buffer for tensors that the model holds",
            ) from error
        name = self.graph.constant(array.astype(NUMPY_DTYPE[tensor.dtype]))
        return Value(name, tensor.dtype, tuple(tensor.shape))

    def _lowered(self, node: fx.Node, function: Callable[..., Any]) -> Any:
        out = node.meta["val"]
        _check_dtypes(out)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        try:
            taken, named = registry.arguments(function, functional(node.target), args, kwargs)
            result = function(self.graph, out, *taken, **named)
        except GuardOnDataDependentSymNode as error:
            raise ExportError(
                "a number that depends on data stands where the operator takes a fixed one",
                instead="the tensor itself, with operators that take it (x * scale)",
            ) from error
        except (TypeError, KeyError, ValueError, ArithmeticError, IndexError) as error:
            raise ExportError(
                f"this use of the operator is not supported ({error})",
                instead=instead_of(str(node.target)),
            ) from error
        if not isinstance(result, (tuple, list)):
            return self._named(result, out)
        pairs = zip(result, out, strict=False)
        return tuple(self._named(name, part) if name else None for name, part in pairs)

    def _named(self, name: str, fake: Any) -> Value:
        """The value of a fake tensor; says where the sizes stand that data decide."""
        value = value_of(name, fake)
        for axis, size in enumerate(value.shape):
            symbol = expression(size)
            if isinstance(symbol, sympy.Symbol):
                self.graph.bind_symbol(symbol, name, axis)
        self.graph.shapes.setdefault(name, value.shape)
        return value

    def _evaluated(self, node: fx.Node) -> Any:
        """What torch computes of constants alone."""
        needed = nodes_behind({node})
        if not all(map(_is_constant, needed)):
            raise ExportError("no lowering for this operator", instead=instead_of(str(node.target)))
        _check_dtypes(node.meta["val"])
        found: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for one in (each for each in self.module.graph.nodes if each in needed):
                if one.op == "get_attr":
                    found[one] = getattr(self.module, str(one.target))
                else:
                    args, kwargs = fx.map_arg((one.args, dict(one.kwargs)), found.__getitem__)
                    found[one] = functional(one.target)(*args, **kwargs)
        return tree_map(self._constant, found[node])


def value_of(name: str, fake: torch.Tensor) -> Value:
    """The value by this name of a fake tensor's dtype and shape."""
    _check_dtypes(fake)
    return Value(name, fake.dtype, tuple(fake.shape))


def _check_dtypes(out: Any) -> None:
    for part in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(part, torch.Tensor) and part.dtype not in ONNX_DTYPE:
            raise ExportError(
                f"dtype {part.dtype} is not supported",
                instead="float32 or int64: no autocast, no .half(), no complex numbers",
            )


def _is_constant(node: fx.Node) -> bool:
    """Whether a node, of constants, is one: no input or free size, not random, and no write."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    target = functional(node.target)
    return (
        isinstance(target, OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
    )


def functional(target: Any) -> Any:
    """The out-of-place overload of an in-place operator; any other operator unchanged."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    name = schema.name.split("::")[1]
    if not name.endswith("_"):
        return target
    packet = getattr(torch.ops.aten, name[:-1], None)
    # ``floor_divide_.Tensor`` is that of ``floor_divide``, which has one form.
    return getattr(packet, target._overloadname, getattr(packet, "default", target))


# Sigmoids that are read as probabilities, exact where they are small.
#
# onnxruntime's Sigmoid is exact to 6e-8 absolutely: that of -16 is half too small, that of -20 is
# 0. To a gate this is nothing; a logarithm of it, a cross-entropy say, would be -inf, and teach
# nothing where a model is most wrong. 1 / (1 + exp(-x)) is exact to a few roundings at every x, and
# takes four passes in place of one.

# What leaves a probability one, or at least a small number small.
_PASSED_ON = {
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "select", "slice", "expand", "t",
    "permute", "transpose", "clone", "cat", "stack", "index", "index_select", "gather", "clamp",
    "clamp_min", "clamp_max", "maximum", "minimum", "add", "sub", "rsub", "mul", "div", "neg",
    "where", "_to_copy", "detach", "alias", "unbind", "split", "split_with_sizes", "getitem",
}  # fmt: skip
_READ = {"log", "log2", "log10", "log1p", "binary_cross_entropy", "output"}


def probabilities(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The sigmoids among these nodes whose elements reach a logarithm or a result of the graph."""
    return {node for node in nodes if _name(node).rstrip("_") == "sigmoid" and _is_read(node)}


def sigmoid(g: Graph, out: torch.Tensor, a: Value) -> str:
    """1 / (1 + exp(-x)), elementwise."""
    below = g.op("Exp", g.op("Neg", g.cast(a, out.dtype)))
    return g.op("Reciprocal", g.op("Add", below, g.scalar(1, out.dtype)))


def _is_read(node: fx.Node) -> bool:
    queue, seen = list(node.users), {node}
    while queue:
        user = queue.pop()
        name = _name(user)
        if name in _READ:
            return True
        if name in _PASSED_ON and user not in seen:
            seen.add(user)
            queue += user.users
    return False


def _name(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))
