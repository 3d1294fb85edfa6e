"""Records a pure function of named tensors as one aten graph with named symbolic sizes."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from export.axes import Axes, Shape
from export.errors import ExportError
from export.insides import (
    DimDynamic,
    FakeTensorMode,
    PythonKeyTracer,
    StatelessSymbolicContext,
    SymNode,
    enable_python_dispatcher,
    is_fake,
    make_fx,
    proxy_tensor,
    use_lazy_graph_module,
)
from export.lowering.decompositions import decompositions
from export.mutation import shared_write, without_writes, written_inputs
from export.origins import Origins, of
from export.rewrites import Replacement
from export.rewrites.numbers import File, ReadInFile, read_in
from export.rewrites.patch import patched
from export.sizes import (
    MOST_ROUNDS,
    MOST_WAYS,
    Question,
    Selections,
    Sizes,
    TooManyWays,
    too_many_ways,
)
from export.symbols import expression, renamed, symbols_in

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


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """torch logs what fails on fake tensors; an error is said once, where it is refused."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def record(
    function: NamedFunction,
    inputs: Mapping[str, Spec],
    axes: Axes,
    model: nn.Module,
    held: Mapping[str, Tensor] | None = None,
) -> Trace:
    """Trace ``function`` on fake tensors; no arithmetic is done and no memory is taken.

    Where the author's code branches on data, it is traced once for each combination of answers; in
    loops whose rounds data count, for each number of rounds up to as many as there are ways for.
    Where that cannot be done, whether a selection is empty is no such question: it is taken not to
    be, and a step in which it is will be refused.
    ``held``: the values of those inputs that a step leaves as they are. Code may branch on them as
    on constants; a step with others is refused.
    Raises ExportError where the function does something else that depends on data. Call
    ``check_axes`` when all is lowered: it finds assumptions on the size of a dynamic axis.
    """
    selections = Selections()
    recorder = _Recorder(function, inputs, axes, model, held or {}, selections)
    try:
        return recorder.in_all_ways()
    except ExportError:
        if not selections.asked:
            raise
    return replace(recorder, selections=Selections(never_empty=True)).in_all_ways()


class _Raised(Exception):
    """The author's code raises in one way of a step, after these questions."""

    def __init__(self, error: ExportError, questions: Sequence[Question]) -> None:
        super().__init__(str(error))
        self.error, self.questions = error, questions


@dataclass(frozen=True)
class _Recorder:
    """All that the recordings of one function have in common."""

    function: NamedFunction
    inputs: Mapping[str, Spec]
    axes: Axes
    model: nn.Module
    held: Mapping[str, Tensor]
    selections: Selections
    most_rounds: int = 0
    files: list[File] = field(default_factory=list)

    def in_all_ways(self) -> Trace:
        for rounds in MOST_ROUNDS:
            try:
                return replace(self, most_rounds=rounds)._in_all_ways()
            except TooManyWays:
                if rounds == MOST_ROUNDS[-1] or not self.selections.counted:
                    raise
        raise AssertionError("there are rounds")

    def _in_all_ways(self) -> Trace:
        ways: list[Trace] = []
        raised: list[_Raised] = []
        left: list[tuple[bool, ...]] = [()]
        while left:
            answers = left.pop(0)
            try:
                ways.append(self._recorded(answers))
                questions: Sequence[Question] = ways[-1].env.questions
            except _Raised as error:
                raised.append(error)
                questions = error.questions
            left += _otherwise(questions, len(answers))
            if left and len(ways) + len(raised) + len(left) > MOST_WAYS:
                raise too_many_ways().at("", questions[-1].line)
        if not ways:
            raise raised[0].error from raised[0]
        first = ways[0]
        for other in ways[1:]:
            if other.outputs != first.outputs:
                raise ExportError(
                    "the ways of a branch on data give outputs of different names",
                    line=other.env.questions[-1].line,
                    instead="the same outputs in both",
                )
        for each in raised:
            _say_raised(each)
            ways.append(self._recorded([question.answer for question in each.questions], first))
        first.others.extend(ways[1:])
        for line in dict.fromkeys(way.env.cut for way in ways if way.env.cut):
            warnings.warn(
                f"the loop in `{line}` has as many rounds as data decide: the step is recorded "
                f"with up to {self.most_rounds}, and a device refuses one of more",
                stacklevel=6,
            )
        return first

    def _recorded(self, answers: Sequence[bool], like: Trace | None = None) -> Trace:
        """One way; ``like`` is one of the same outputs that does not raise, if this does."""
        while True:
            try:
                with left_as_it_was(self.model), read_in(self.files):
                    return _recorded(self, answers, like)
            except ReadInFile as asked:
                self.files.append(asked.file)


def _say_raised(raised: _Raised) -> None:
    where = ", ".join(f"`{each.line}` is {each.answer}" for each in raised.questions)
    warnings.warn(
        f"where {where}, the code raises ({raised.error.what.removeprefix(_FAILED)}; at "
        f"{raised.error.line}): a device refuses such a step",
        stacklevel=6,
    )


def _refusing(like: Trace, given: Mapping[str, Tensor], env: Sizes) -> dict[str, Tensor]:
    """The outputs of a way that raises, of no value: state as it was, the rest zeros."""
    env.needed[sympy.Integer(-1)] = None
    ends = list(like.graph.graph.nodes)[-1].args[0]
    found: dict[str, Tensor] = {}
    for name, end in zip(like.outputs, ends, strict=True):
        made = end.meta["val"]
        state = "state." + name.removeprefix("new.")
        sizes = [_size(expression(size), env) for size in made.shape]
        found[name] = (
            given[state].clone()
            if name.startswith("new.") and state in given
            else torch.zeros(sizes, dtype=made.dtype)
        )
    return found


def _size(size: sympy.Expr, env: Sizes) -> Any:
    """A size of another recording's, in this one; 0 where data decide it there."""
    if size.is_number:
        return int(size)
    if not size.free_symbols <= env.backed_var_to_val.keys():
        return 0
    return torch.SymInt(SymNode(size, env, int, None))


def _otherwise(questions: Sequence[Question], given: int) -> list[tuple[bool, ...]]:
    """The answers of the recordings that differ from one by one of those not given to it."""
    answers = tuple(question.answer for question in questions)
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


def _recorded(recorder: _Recorder, answers: Sequence[bool], like: Trace | None) -> Trace:
    function, inputs = recorder.function, recorder.inputs
    axes, model = recorder.axes, recorder.model
    origins = Origins()
    env = Sizes(origins, answers, recorder.selections)
    env.most_rounds = recorder.most_rounds
    env.held = {n: recorder.held[name] for n, name in enumerate(inputs) if name in recorder.held}
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
        given = dict(zip(inputs, tensors, strict=True))
        try:
            results = function(given)
        except Exception as error:
            if not env.questions or not _is_the_authors(error):
                raise
            if like is None:
                origin = origins.of_error(error)
                said = _explained(error, symbols, env).at(origin.module, origin.line)
                raise _Raised(said, list(env.questions)) from error
            results = _refusing(like, given, env)
        names.extend(results)
        return list(results.values())

    try:
        with (
            mode,
            enable_python_dispatcher(),
            _plain_convolution(),
            _no_tracebacks(),
            origins.inside(model),
        ):
            graph = _graph(flat, fakes)
            _refuse_kept_tensors(graph, model)
            graph = _without_shared_writes(graph, fakes, env)
    except _Raised:
        raise
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
    with patched(_NOT_NOTED), use_lazy_graph_module(True):
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
        if tensor.numel() > 0 and tensor.layout == torch.strided
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


def _is_the_authors(error: Exception) -> bool:
    """Whether code raises where torch would as well, and not for being recorded."""
    kind, text = type(error).__name__, str(error)
    of_recording = ("DataDependent", "DynamicOutputShape", "UnsupportedOperator")
    return not (
        isinstance(error, (ExportError, NotImplementedError))
        or any(each in kind for each in of_recording)
        or "is not implemented" in text
        or ".numpy() is not supported" in text
    )


_FAILED = "tracing failed: "


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
        f"{_FAILED}{kind}: {first}",
        instead=f"sizes taken from tensors (x.shape[0]) where {named[0]!r} is dynamic, and "
        f"embeddings of torch.arange(n) in place of a fixed table's slice (table[:n])"
        if named
        else "",
    )


# Up to which a size is tried that may make another one of 1.
_LARGEST_HALVED = 65
