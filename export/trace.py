"""Records a pure function of named tensors as one aten graph with named symbolic sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    StatelessSymbolicContext,
)

from export.axes import Axes, Shape
from export.errors import ExportError
from export.lowering.decompositions import decompositions
from export.lowering.graph import expression
from export.mutation import shared_write, without_writes, written_inputs
from export.origins import Origins, of
from export.rewrites import Replacement
from export.rewrites.numbers import File, ReadInFile, read_in
from export.rewrites.patch import patched
from export.rewrites.sparse import is_sparse
from export.sizes import MOST_WAYS, Selections, Sizes, renamed, symbols_in, too_many_ways

NamedFunction = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Spec:
    """A graph input's dtype and named shape."""

    dtype: torch.dtype
    shape: Shape


@dataclass
class Trace:
    """The recorded graph, with inputs and outputs in order of their names."""

    graph: fx.GraphModule
    inputs: dict[str, Spec]
    outputs: list[str]
    symbols: dict[sympy.Symbol, str]
    env: Sizes
    others: list[Trace] = field(default_factory=list)
    """Recordings of the same function that answered its branches on data otherwise."""

    @property
    def ways(self) -> list[Trace]:
        """This recording and the others."""
        return [self, *self.others]

    def squeezed(self) -> list[dict[str, int]]:
        """The axes' sizes at which a ``squeeze()`` without an axis drops one more axis in torch.

        Such a size is 1, or makes a size of 1 (of the half, at 2 and 3).
        """
        found: list[dict[str, int]] = []
        for node in (each for way in self.ways for each in way.graph.graph.nodes):
            if node.target is torch.ops.aten.squeeze.default:
                for size in node.args[0].meta["val"].shape:
                    named = self._where_one(expression(size))
                    if named and named not in found:
                        found.append(named)
        return found

    def _where_one(self, size: sympy.Expr) -> dict[str, int]:
        free = [symbol for symbol in size.free_symbols if symbol in self.symbols]
        if len(free) == 1 == len(size.free_symbols):
            for number in range(1, _LARGEST_HALVED):
                if size.xreplace({free[0]: sympy.Integer(number)}) == 1:
                    return {self.symbols[free[0]]: number}
        return {}

    def check_axes(self) -> dict[str, int]:
        """The least sizes of axes that need one above 1.

        Raises ExportError where tracing or lowering assumed something else of an axis's size.
        """
        least: dict[str, int] = {}
        for way in self.ways:
            for axis, size in way.env.least_sizes(way.symbols).items():
                least[axis] = max(size, least.get(axis, 1))
        return least


@contextmanager
def _plain_convolution() -> Iterator[None]:
    """Convolutions consider neither oneDNN nor NNPACK, which torch chooses by the batch's size."""
    mkldnn = torch.backends.mkldnn
    before = mkldnn.set_flags(_enabled=False, _fp32_precision=None)[0]
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        mkldnn.set_flags(_enabled=before, _fp32_precision=None)


def record(
    function: NamedFunction, inputs: Mapping[str, Spec], axes: Axes, model: nn.Module
) -> Trace:
    """Trace ``function`` on fake tensors; no arithmetic is done and no memory is taken.

    Where the author's code branches on data, it is traced once for each combination of answers.
    Where that cannot be done, whether a selection is empty is no such question: it is taken not to
    be, and a step in which it is will be refused.
    Raises ExportError where the function does something else that depends on data. Call
    ``check_axes`` when all is lowered: it finds assumptions on the size of a dynamic axis.
    """
    selections = Selections()
    try:
        return _in_all_ways(function, inputs, axes, model, selections)
    except ExportError:
        if not selections.asked:
            raise
    return _in_all_ways(function, inputs, axes, model, Selections(never_empty=True))


def _in_all_ways(
    function: NamedFunction,
    inputs: Mapping[str, Spec],
    axes: Axes,
    model: nn.Module,
    selections: Selections,
) -> Trace:
    files: list[File] = []

    def recorded(answers: Sequence[bool]) -> Trace:
        while True:
            try:
                with left_as_it_was(model), read_in(files):
                    return _recorded(function, inputs, axes, model, answers, selections)
            except ReadInFile as asked:
                files.append(asked.file)

    first = recorded(())
    left = _otherwise(first, 0)
    while left:
        if len(first.ways) + len(left) > MOST_WAYS:
            raise too_many_ways().at("", first.env.questions[-1].line)
        answers = left.pop(0)
        other = recorded(answers)
        if other.outputs != first.outputs:
            raise ExportError(
                "the ways of a branch on data give outputs of different names",
                line=other.env.questions[len(answers) - 1].line,
                instead="the same outputs in both",
            )
        first.others.append(other)
        left += _otherwise(other, len(answers))
    return first


def _otherwise(trace: Trace, given: int) -> list[tuple[bool, ...]]:
    """The answers of the recordings that differ from this one by one of those not given to it."""
    answers = tuple(question.answer for question in trace.env.questions)
    return [(*answers[:number], False) for number in range(given, len(answers))]


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Takes back what recording a step leaves in the model: modes, and attributes it sets."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _recorded(
    function: NamedFunction,
    inputs: Mapping[str, Spec],
    axes: Axes,
    model: nn.Module,
    answers: Sequence[bool],
    selections: Selections,
) -> Trace:
    origins = Origins()
    env = Sizes(origins, answers, selections)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    # To look for results of equal operands takes as long as to find shapes anew, or longer.
    mode.cache_enabled = False
    sizes = axes.trace_sizes()
    fakes: dict[str, Tensor] = {}
    symbols: dict[sympy.Symbol, str] = {}
    for name, spec in inputs.items():
        dynamic = [
            DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in spec.shape
        ]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=dynamic
        )
        real = torch.empty(axes.concrete(spec.shape, sizes), dtype=spec.dtype)
        fakes[name] = mode.from_tensor(real, symbolic_context=context)
        for dim, size in enumerate(spec.shape):
            if isinstance(size, str):
                symbols[expression(fakes[name].shape[dim])] = size
    names: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        origins.watch(_code_of(flat))
        results = function(dict(zip(inputs, tensors, strict=True)))
        names.extend(results)
        return list(results.values())

    try:
        with mode, enable_python_dispatcher(), _plain_convolution(), origins.inside(model):
            graph = _graph(flat, fakes)
            _refuse_kept_tensors(graph, model)
            graph = _without_shared_writes(graph, fakes, env)
    except ExportError as error:
        origin = origins.of_error(error)
        raise error.at(origins.module, origin.line) from error
    except Exception as error:
        origin = origins.of_error(error)
        raise _explained(error, symbols, env).at(origin.module, origin.line) from error
    return Trace(graph, dict(inputs), names, symbols, env)


def _graph(function: Callable[..., Any], fakes: Mapping[str, Tensor]) -> fx.GraphModule:
    """What the function does to these tensors, without what torch notes for its compilers.

    They ask each result for its order in memory, each node for the torch function it comes from,
    each size for the nodes that compute it, and the graph for Python code.
    """
    recording = make_fx(
        function,
        decomposition_table=decompositions(),
        tracing_mode="real",
        _disable_torch_fn_metadata_mode=True,
    )
    with patched(_NOT_NOTED), _use_lazy_graph_module(True):
        return recording(*fakes.values())


def _tracked(tensor: Tensor, proxy: fx.Proxy, *, constant: Any, tracer: Any) -> None:
    proxy_tensor.set_proxy_slot(tensor, tracer, proxy_tensor._ProxyTensor(proxy, constant))


def _taken_numbers(tracer: PythonKeyTracer) -> Callable[[Any], Any]:
    """What a node is given for a size: one node for each, that says how it is computed.

    That of a size which data decide is made of the nodes that decide it.
    """
    numbers: dict[Any, fx.Proxy] = vars(tracer).setdefault("numbers", {})

    def taken(number: Any) -> Any:
        node = number.node
        if node.constant is not None:
            return node.constant
        if node.expr.is_number:
            return node.pytype(node.expr)
        key = type(number), node.expr
        if key not in numbers:
            by_data = node.expr.free_symbols - node.shape_env.backed_var_to_val.keys()
            numbers[key] = _number(number, by_data, tracer)
        return numbers[key]

    return taken


def _number(number: Any, by_data: Collection[sympy.Symbol], tracer: PythonKeyTracer) -> fx.Proxy:
    nodes = tracer.graph.nodes
    makers = dict.fromkeys(
        next(made for made in nodes if symbol in symbols_in(made.meta.get("val")))
        for symbol in sorted(by_data, key=str)
    )

    def number_of(*made: Any) -> Any:
        given: dict[sympy.Symbol, sympy.Expr] = {}
        for maker, value in zip(makers, made, strict=True):
            given |= renamed(maker.meta["val"], value)
        if not given:
            return number
        node = number.node
        return type(number)(SymNode(node.expr.xreplace(given), node.shape_env, node.pytype, None))

    proxies = tuple(fx.Proxy(maker, tracer) for maker in makers)
    proxy = tracer.create_proxy("call_function", number_of, proxies, {})
    proxy.node.meta["val"] = number
    return proxy


_NOT_NOTED: Sequence[Replacement] = (
    (proxy_tensor, "_extract_tensor_metadata", lambda tensor: None),
    # Whom arithmetic on sizes asks whether it is recorded.
    (proxy_tensor, "get_proxy_mode", lambda: None),
    (proxy_tensor, "fetch_sym_proxy", _taken_numbers),
    (proxy_tensor, "track_tensor", _tracked),
)


def _code_of(function: Any) -> CodeType:
    code: CodeType = function.__code__
    return code


def _refuse_kept_tensors(graph: fx.GraphModule, model: nn.Module) -> None:
    """Refuse parameters and buffers that came in as constants: as views from before the step.

    Each step gives the model new values; such a view would keep the old.
    """
    held = {
        tensor.untyped_storage().data_ptr(): name
        for source in (model.named_parameters(), model.named_buffers())
        for name, tensor in source
        if tensor.numel() > 0 and not is_sparse(tensor)
    }
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, str(node.target))
        if isinstance(tensor, Tensor) and tensor.numel() > 0 and not is_fake(tensor):
            name = held.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                raise ExportError(
                    f"{name!r} is used as a constant: what is used is a view of it from before the "
                    "step",
                    module=of(node).module,
                    line=of(node).line,
                    instead="the parameter or buffer itself, and its views (detach, data, t) made "
                    "where they are used",
                )


def _without_shared_writes(
    graph: fx.GraphModule, fakes: Mapping[str, Tensor], env: Sizes
) -> fx.GraphModule:
    """Record the graph once more, as plain functions, where it writes into memory that is shared.

    ``y[:, 0] = x`` and the like; most graphs have none and stay as they are.
    """
    first = shared_write(graph.graph)
    if first is None:
        return graph
    plain = _graph(without_writes(graph, Origins().again, env.again), fakes)
    for name in written_inputs(plain.graph, list(fakes)):
        if name.startswith("state."):
            raise ExportError(
                "the model writes into its own parameters, which only a step may change",
                operator=str(first.target),
                module=of(first).module,
                line=of(first).line,
                instead="a function of the parameter where it is used (w.clamp(...)), or a "
                "penalty in the loss",
            )
    write = shared_write(plain.graph)
    if write is not None:
        raise ExportError(
            "an in-place write to memory that is read again through another view",
            operator=str(write.target),
            module=of(write).module,
            line=of(write).line,
            instead="the out-of-place form (x = x + y, torch.where, torch.cat)",
        )
    return plain


def _explained(error: Exception, symbols: Mapping[sympy.Symbol, str], env: Sizes) -> ExportError:
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    first = text[0] if text else kind
    if "DataDependent" in kind or "GuardOnDataDependent" in kind or "DynamicOutputShape" in kind:
        operator = re.search(r"aten\.[a-zA-Z0-9_.]+", str(error))
        return ExportError(
            f"the model's path or a size depends on data ({first})",
            operator=operator.group(0) if operator else ".item()",
            instead=env.instead
            or "torch.where and masks in place of boolean indexing; numbers that the step needs "
            "given from outside: as batch inputs, or as a size",
        )
    if ".numpy() is not supported" in first:
        return ExportError(
            "numbers are read out of a tensor that the step computes (.numpy(), .tolist())",
            operator=".numpy()",
            instead="torch's functions in place of numpy's; what decides sizes as fixed numbers",
        )
    if "is not implemented" in first and "derivative" in first:
        return ExportError(
            f"torch has no gradient there: {first}",
            operator=first.split("for ")[-1].split(" ")[0].replace("::", "."),
            instead="x.detach() as its input, where no gradient is wanted",
        )
    named = [axis for symbol, axis in symbols.items() if re.search(rf"\b{symbol}\b", first)]
    for symbol, axis in symbols.items():
        first = re.sub(rf"\b{symbol}\b", axis, first)
    if named and "//" in first and "must match" in first:
        return ExportError(
            f"two sizes that are joined are equal only at some sizes of {named[0]!r} ({first})",
            instead="sizes made equal inside the model: functional.pad(y, [0, x.shape[3] - "
            "y.shape[3], 0, x.shape[2] - y.shape[2]]), or functional.interpolate(y, "
            f"size=x.shape[2:]); or {named[0]!r} not dynamic",
        )
    return ExportError(
        f"tracing failed: {kind}: {first}",
        instead=f"sizes taken from tensors (x.shape[0]) where {named[0]!r} is dynamic, and "
        f"embeddings of torch.arange(n) in place of a fixed table's slice (table[:n])"
        if named
        else "",
    )


# Up to which a size is tried that may make another one of 1.
_LARGEST_HALVED = 65
