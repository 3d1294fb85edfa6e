"""Large state is written where it lies, behind a gate that opens when the whole step is known good.

A step reads one bank of state and writes the other, so that a bad step changes nothing; for large
tensors the second bank is memory. Here the update of these moves into the branch of an ``If``
whose condition is that loss and guard are finite, and that all else the step gives is there. What
reads the old values for these has run before; inside, a tensor is listed as written in place only
where every node that reads its old value comes before the one that writes the new (or is that one,
which works element by element). The others of the branch keep two banks.

The guard no longer sees new values, since it comes before them. That they would be finite is
proved by bounds: the update computed on intervals, from the gradients' largest magnitude and from
what is known of parameters and optimizer state. Rounding is monotone, so what holds for the ends of
the intervals holds for what lies between. The intervals of the new state are an output, and an
input of the next step; where nothing is known, or what is known has become too wide, the state is
measured. Where the proof fails (values of 1e10 and more), the update is computed beforehand, only
to be summed, and the guard is exactly what it is without a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from export.lowering.graph import IR_VERSION, OPSET, Graph, live_nodes, used_names

LEAST_STATE_BYTES = 1 << 24
"""Of all state: below, a second bank is little beside what a process takes anyway."""

LEAST_TENSOR_BYTES = 1 << 20
"""Of a state tensor: smaller ones cost more nodes than memory."""

BOUND = 2.0**90
"""Of what a proof allows a value to be: the sum of 2**32 such values is finite, too."""

BOUNDS, NEW_BOUNDS = "bounds", "new_bounds"
"""The input and the output that say what the state lies between: two numbers a kind of tensor."""

WIDE = 2.0**60
"""Of the known bounds, their magnitudes summed: from here on the state is measured anew."""

# What the known bounds are widened by at each step, for arithmetic that rounds otherwise.
_WIDENED = 2.0**-20

Interval = tuple[str, str]


@dataclass(frozen=True)
class Large:
    """A state tensor that may be written in place.

    ``kind``: "parameter", or the kind of optimizer state; one bound holds for all of a kind.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class Gated:
    """A train graph, and the names of the state tensors that it may write where they lie."""

    model: onnx.ModelProto
    in_place: tuple[str, ...] = ()


def gated(model: onnx.ModelProto, large: Sequence[Large], hyper: Mapping[str, float]) -> Gated:
    """The train graph with the update of large state behind a gate; as it was, where none can be.

    ``model`` has outputs ``gradient.<parameter state tensor>`` for the large parameters, which are
    no outputs of the result. ``hyper``: the defaults of the run-time inputs.
    """
    if not large:
        return Gated(model)
    plain = _without_gradients(model)
    update = _Update(model, large)
    if not update.inside:
        return Gated(plain)
    found = _GateNodes(update, model).built()
    if not _provable(update, found, hyper):
        return Gated(plain)
    in_place = update.in_place()
    return Gated(_finished(model, found), tuple(in_place)) if in_place else Gated(plain)


def _without_gradients(model: onnx.ModelProto) -> onnx.ModelProto:
    outputs = [each for each in model.graph.output if not each.name.startswith("gradient.")]
    return _rebuilt(model, model.graph.node, outputs)


def _rebuilt(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Iterable[onnx.TensorProto] = (),
    inputs: Iterable[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    """The model with other nodes and outputs, of which only what the outputs need is kept."""
    live = live_nodes(list(nodes), [output.name for output in outputs])
    used = used_names(live) | {output.name for output in outputs}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for field in ("node", "output", "initializer", "input"):
        result.graph.ClearField(field)
    result.graph.node.extend(live)
    result.graph.output.extend(outputs)
    # What no node takes is there for its length.
    used |= {each.name for each in model.graph.input} - used_names(model.graph.node)
    given = (*model.graph.input, *inputs)
    result.graph.input.extend(each for each in given if each.name in used)
    held = (*model.graph.initializer, *constants)
    result.graph.initializer.extend(each for each in held if each.name in used)
    return result


# Which nodes are the update of which state tensor, and what may read a tensor that is overwritten.

_ELEMENTWISE = frozenset(
    ("Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Sign", "Max", "Min", "Reciprocal")
)
# What computes new numbers into memory of its own, whatever onnxruntime makes of it. Through
# anything else a value is taken for its input's memory: a view, or a node that may be removed.
_FRESH = {
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "ScatterND", "ScatterElements", "Gather", "Shape"),
    *("ConstantOfShape", "ReduceMean", "Sqrt", "Exp", "Log", "Tanh", "Sigmoid", "Erf", "Softmax"),
    *("LogSoftmax", "Relu", "Neg", "Less", "LessOrEqual", "Greater", "Equal"),
}


class _Update:
    """The part of a train graph that makes large new state out of gradients and old state."""

    def __init__(self, model: onnx.ModelProto, large: Sequence[Large]) -> None:
        self.nodes = list(model.graph.node)
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.constants = {each.name for each in model.graph.initializer}
        self._inputs = {each.name for each in model.graph.input}
        self._constant: dict[str, bool] = {"": True}
        self._shapes = _shapes(model)
        self._outputs = [each.name for each in model.graph.output]
        self.initializers = list(model.graph.initializer)
        self.leaves = {
            **{f"state.{each.name}": each.kind for each in large},
            **{name: "gradient" for name in self._outputs if name.startswith("gradient.")},
        }
        self.cones: dict[str, list[onnx.NodeProto]] = {}
        for each in large:
            cone = self._cone(each.name)
            if cone is not None:
                self.cones[each.name] = cone
        self.inside = self._settled()

    def is_number(self, name: str) -> bool:
        """Whether a value is known to have one element: it stays outside."""
        shape = self._shapes.get(name)
        return shape is not None and all(size == 1 for size in shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """A number's shape, all of ones."""
        return tuple(int(size or 1) for size in self._shapes[name])

    def inputs(self, name: str) -> set[str]:
        """The graph's inputs that a value depends on."""
        used = used_names(live_nodes(self.nodes, [name])) | {name}
        return {each for each in used if each not in self.producer and each not in self.constants}

    def _cone(self, name: str) -> list[onnx.NodeProto] | None:
        """The nodes from leaves and numbers to the new value; None where one is of another kind."""
        shape = self._shapes.get(f"state.{name}")
        found: dict[int, onnx.NodeProto] = {}
        queue = [f"new.{name}"]
        if f"new.{name}" not in self.producer:
            return None
        while queue:
            value = queue.pop()
            if self._shapes.get(value) != shape:
                return None
            if value in self.leaves:
                continue
            node = self.producer.get(value)
            if node is None or node.op_type not in _ELEMENTWISE:
                return None
            if id(node) not in found:
                found[id(node)] = node
                queue += [each for each in node.input if not self.is_number(each)]
        return [node for node in self.nodes if id(node) in found]

    def _settled(self) -> list[onnx.NodeProto]:
        """The nodes of the branch; drops the tensors whose update is needed outside, too."""
        while True:
            inside = {id(node): node for cone in self.cones.values() for node in cone}
            outside = {id(node) for node in self.outside()}
            needed = [name for name, cone in self.cones.items() if {id(n) for n in cone} & outside]
            if not needed:
                return [node for node in self.nodes if id(node) in inside]
            for name in needed:
                del self.cones[name]

    @property
    def numbers(self) -> set[str]:
        """The scalars that the branch reads."""
        read = {name for cone in self.cones.values() for node in cone for name in node.input}
        return {name for name in read if self.is_number(name)}

    @property
    def sums(self) -> dict[str, str]:
        """The guard's terms that are sums of the branch's results, by these results' names."""
        sums: dict[str, str] = {}
        of = {f"new.{name}": f"new.{name}" for name in self.cones}
        for node in self.nodes:
            # A long sum has the sums of groups behind it.
            if node.op_type in ("Reshape", "ReduceSum") and node.input[0] in of:
                new = of[node.output[0]] = of[node.input[0]]
                if node.op_type == "ReduceSum":
                    sums[new] = node.output[0]
        return sums

    def outside(self) -> list[onnx.NodeProto]:
        """What is computed before the branch: all that is not a result of it, but for its sums."""
        news = {f"new.{name}" for name in self.cones}
        roots = {name for name in self._outputs if name not in news} | self.numbers
        cut = set(self.sums.values())
        return live_nodes([node for node in self.nodes if not set(node.output) & cut], roots)

    def in_place(self) -> list[str]:
        """The state tensors whose old value nothing reads once the new one is being written."""
        inside = {id(node) for node in self.inside}
        outside = [node for node in self.outside() if id(node) not in inside]
        awaited = {id(node) for node in live_nodes(outside, self._awaited())}
        late = {
            name
            for node in outside
            if id(node) not in awaited
            for source in used_names([node])
            for name in self._memory(source)
        }
        aliased = {
            name
            for leaf in self.leaves
            if leaf.startswith("gradient.")
            for name in self._memory(leaf)
        }
        return [
            name
            for name in self.cones
            if f"state.{name}" not in late | aliased and self._read_before_written(name)
        ]

    @property
    def others(self) -> list[str]:
        """The graph's results that the branch does not make."""
        inside = {f"new.{name}" for name in self.cones}
        return [n for n in self._outputs if n not in inside and not n.startswith("gradient.")]

    def _awaited(self) -> set[str]:
        """What the gate's condition depends on."""
        read = {name for node in self.inside for name in node.input}
        return {*self.others, *(read & set(self.leaves) - self._inputs), *self.numbers}

    def _read_before_written(self, name: str) -> bool:
        old, writer = f"state.{name}", self.producer[f"new.{name}"]
        before = {id(node) for node in live_nodes(self.inside, [f"new.{name}"])}
        held, readers = {old}, []
        for node in self.inside:
            if held & set(node.input):
                readers.append(node)
                # onnxruntime may leave out a node that adds 0 or multiplies by 1.
                rest = [each for each in node.input if each not in held]
                if node is not writer and all(map(self._is_constant, rest)):
                    held |= set(node.output)
        return all(id(node) in before for node in readers)

    def _memory(self, value: str) -> Iterator[str]:
        """Graph inputs whose memory a value may be, by a chain of views."""
        queue, seen = [value], {value}
        while queue:
            value = queue.pop()
            node = self.producer.get(value)
            if node is None:
                yield value
            elif node.op_type not in _FRESH and not self._joins(node):
                queue += used_names([node]) - seen
                seen |= used_names([node])

    def _is_constant(self, name: str) -> bool:
        """Whether a value depends on no input, or on shapes of inputs only."""
        known = self._constant.get(name)
        if known is None:
            node = self.producer.get(name)
            known = name in self.constants or (
                node is not None
                and (node.op_type == "Shape" or all(map(self._is_constant, used_names([node]))))
            )
            self._constant[name] = known
        return known

    def _joins(self, node: onnx.NodeProto) -> bool:
        """Whether a node makes new numbers out of several that are computed."""
        several = [name for name in node.input if name and not self._is_constant(name)]
        return len(several) > 1 and node.op_type in _ELEMENTWISE | {"Where", "Concat", "Sum"}


def _float(value: float | np.floating[Any]) -> np.ndarray[Any, Any]:
    return np.array(value, np.float32)


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int | str | None, ...]]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    found: dict[str, tuple[int | str | None, ...]] = {
        each.name: tuple(each.dims) for each in model.graph.initializer
    }
    for info in (*inferred.value_info, *inferred.input, *inferred.output):
        if info.type.tensor_type.HasField("shape"):
            found[info.name] = tuple(
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
                for dim in info.type.tensor_type.shape.dim
            )
    return found


# The update computed on intervals instead of tensors.


class _Nodes(Graph):
    """Nodes beside those of a model, whose names they do not take."""

    def name(self, hint: str) -> str:
        return f"gate.{super().name(hint)}"

    def child(self) -> _Nodes:
        return _Nodes(parent=self)


class _Intervals:
    """Values of a graph as intervals, each kind of leaf by one of ``leaves``."""

    def __init__(self, graph: Graph, update: _Update, leaves: Mapping[str, Interval]) -> None:
        self._graph = graph
        self._update = update
        self._leaves = leaves
        self._known: dict[str, Interval] = {}
        self.ends: dict[str, None] = {}
        self.positive: dict[str, None] = {}
        """Values that have to be above 0, or nothing is proved."""

    def of(self, value: str) -> Interval:
        """A value's interval, whose ends are scalars of the graph."""
        if value not in self._known:
            self._known[value] = found = self._made(value)
            self.ends |= dict.fromkeys(found)
        return self._known[value]

    def _made(self, value: str) -> Interval:
        if value in self._update.leaves:
            return self._leaves[self._update.leaves[value]]
        if self._update.is_number(value):
            number = self._graph.op("Reshape", value, self._graph.ints([]))
            return number, number
        node = self._update.producer[value]
        squared = node.op_type == "Mul" and node.input[0] == node.input[1]
        given = [self.of(name) for name in node.input]
        if squared:
            return self._square(given[0])
        (low, high), *rest = given
        op = self._graph.op
        match node.op_type:
            case "Add":
                return op("Add", low, rest[0][0]), op("Add", high, rest[0][1])
            case "Sub":
                return op("Sub", low, rest[0][1]), op("Sub", high, rest[0][0])
            case "Max" | "Min":
                ends = zip(*given, strict=True)
                lows, highs = (op(node.op_type, *each) for each in ends)
                return lows, highs
            case "Sqrt":
                return op("Sqrt", low), op("Sqrt", high)
            case "Neg":
                return op("Neg", high), op("Neg", low)
            case "Sign":
                one = self._graph.constant(_float(1))
                return op("Neg", one), one
            case "Abs":
                zero = self._graph.constant(_float(0))
                return zero, op("Max", op("Abs", low), op("Abs", high))
            case "Reciprocal":
                return self._apart_from_zero("Div", [self._one, (low, high)])
            case "Div":
                return self._apart_from_zero("Div", given)
        return self._corners("Mul", given)

    @property
    def _one(self) -> Interval:
        one = self._graph.constant(_float(1))
        return one, one

    def _square(self, of: Interval) -> Interval:
        zero = self._graph.constant(_float(0))
        return zero, self._graph.op("Max", *(self._graph.op("Mul", end, end) for end in of))

    def _corners(self, op_type: str, given: Sequence[Interval]) -> Interval:
        left, right = (tuple(dict.fromkeys(each)) for each in given)
        ends = [self._graph.op(op_type, a, b) for a in left for b in right]
        # A maximum may pass over a NaN.
        self.ends |= dict.fromkeys(ends)
        return self._graph.op("Min", *ends), self._graph.op("Max", *ends)

    def _apart_from_zero(self, op_type: str, given: Sequence[Interval]) -> Interval:
        self.positive[self._graph.op("Mul", *given[1])] = None
        return self._corners(op_type, given)


@dataclass(frozen=True)
class _Parts:
    """What takes the place of a train graph's update."""

    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[onnx.TensorProto, ...]
    outside: tuple[onnx.NodeProto, ...]
    kinds: Sequence[str]
    """The kinds of state whose bounds ``gate.known`` holds, a lower and an upper one each."""
    never_negative: frozenset[str]
    """Those whose least value was looked at."""
    proved: str


class _GateNodes:
    """Makes the nodes of a gate: bounds, guard, condition, branch."""

    def __init__(self, update: _Update, model: onnx.ModelProto) -> None:
        self._update = update
        self._graph = _Nodes()
        self._outputs = {each.name: each for each in model.graph.output}
        read = {name for node in update.inside for name in node.input}
        self._leaves: dict[str, list[str]] = {}
        for leaf, kind in update.leaves.items():
            if leaf in read:
                self._leaves.setdefault(kind, []).append(leaf)
        self._kinds = [kind for kind in self._leaves if kind != "gradient"]

    def built(self) -> _Parts:
        """The gate's nodes and those before it."""
        update, graph = self._update, self._graph
        sums = update.sums
        outside = []
        for node in update.outside():
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            _replace(copied, dict.fromkeys(sums.values(), self._zero), {"guard": "gate.guard"})
            outside.append(copied)
        if "guard" in sums.values():
            outside.append(helper.make_node("Identity", [self._zero], ["gate.guard"]))
        intervals = _Intervals(graph, update, self._known())
        results = {name: intervals.of(f"new.{name}") for name in update.cones}
        proved = self._proved(intervals)
        self._tell(proved, results)
        beyond = self._if(proved, "beyond", self._zero_sum(), self._summed(list(sums)))
        graph.nodes.append(helper.make_node("Add", ["gate.guard", beyond], ["guard"]))
        most = graph.constant(_float(np.finfo(np.float32).max))
        finite = [graph.op("LessOrEqual", graph.op("Abs", n), most) for n in ("loss", "guard")]
        good = graph.op("And", *finite)
        # Always true, but known only once all else that the step gives is there, or has failed.
        there = graph.op("Max", *(graph.op("Size", name) for name in update.others))
        there = graph.op("GreaterOrEqual", there, graph.constant(np.array(0, np.int64)))
        graph.nodes.append(helper.make_node("And", [good, there], ["begun"]))
        graph.nodes.append(self._branches())
        graph.nodes.append(helper.make_node("And", ["gate.done", "begun"], ["done"]))
        constants = tuple(graph._initializers.values())
        signs = self._never_negative
        return _Parts(tuple(graph.nodes), constants, tuple(outside), self._kinds, signs, proved)

    @property
    def _zero(self) -> str:
        return self._graph.constant(_float(0))

    def _if(self, condition: str, name: str, yes: onnx.GraphProto, no: onnx.GraphProto) -> str:
        output = f"gate.{name}"
        branches = {"then_branch": yes, "else_branch": no}
        self._graph.nodes.append(helper.make_node("If", [condition], [output], **branches))
        return output

    # Between which numbers the leaves lie.

    def _known(self) -> dict[str, Interval]:
        """The interval of each kind of leaf: as the last step left it, measured where it is wide.

        NaN where something is NaN.
        """
        graph, count = self._graph, len(self._kinds)
        wide = graph.constant(_float(WIDE))
        narrow = graph.op(
            "LessOrEqual", graph.op("ReduceSum", graph.op("Abs", BOUNDS), keepdims=0), wide
        )
        same = helper.make_node("Identity", [BOUNDS], ["told.bounds"])
        info = _info("told.bounds", onnx.TensorProto.FLOAT, (2 * count,))
        known = self._if(narrow, "known", _branch("told", [same], [info]), self._measured())
        ends = graph.multi("Split", known, outputs=2 * count, num_outputs=2 * count, axis=0)
        scalars = [graph.op("Reshape", end, graph.ints([])) for end in ends]
        found = dict(zip(self._kinds, zip(scalars[::2], scalars[1::2], strict=True), strict=True))
        if "gradient" in self._leaves:
            found["gradient"] = self._within(graph, "gradient")
        return found

    def _measured(self) -> onnx.GraphProto:
        graph = self._graph.child()
        ends = [end for kind in self._kinds for end in self._within(graph, kind)]
        vectors = [graph.op("Reshape", end, graph.ints([1])) for end in ends]
        found = graph.op("Concat", *vectors, axis=0)
        return graph.body("measured", [], [_info(found, onnx.TensorProto.FLOAT, (len(ends),))])

    def _within(self, graph: Graph, kind: str) -> Interval:
        names = self._leaves[kind]
        squares = [graph.op("ReduceSumSquare", name, keepdims=0) for name in names]
        length = graph.op("Sqrt", graph.op("Sum", *squares))
        # Twice, and a little: squares round, and those below 1e-38 are zero.
        twice = graph.op("Mul", length, graph.constant(_float(2)))
        high = graph.op("Add", twice, graph.constant(_float(1e-18)))
        if kind not in self._never_negative:
            return graph.op("Neg", high), high
        return graph.op("Min", *(graph.op("ReduceMin", n, keepdims=0) for n in names)), high

    @property
    def _never_negative(self) -> frozenset[str]:
        """The kinds of optimizer state that a root is taken of: for these 0 is a bound, too."""
        inside = self._update.inside
        roots = {node.input[0] for node in inside if node.op_type == "Sqrt"}
        read = used_names(live_nodes(inside, roots)) | roots
        kinds = {kind for kind, leaves in self._leaves.items() if read & set(leaves)}
        return frozenset(kinds - {"parameter", "gradient"})

    def _proved(self, intervals: _Intervals) -> str:
        op = self._graph.op
        sizes = [op("Abs", end) for end in intervals.ends]
        proved = op("LessOrEqual", op("Sum", *sizes), self._graph.constant(_float(BOUND)))
        for value in intervals.positive:
            proved = op("And", proved, op("Greater", value, self._zero))
        return proved

    def _tell(self, proved: str, results: Mapping[str, Interval]) -> None:
        """The next step's bounds: infinite where nothing is proved, or a tensor is left out."""
        graph = self._graph
        widened = graph.constant(_float(_WIDENED))
        infinite = graph.constant(_float(np.inf))
        told = []
        for kind in self._kinds:
            names = [leaf.removeprefix("state.") for leaf in self._leaves[kind]]
            every = dict.fromkeys(results[name] for name in names if name in results)
            for operator, side, way in (("Min", 0, "Sub"), ("Max", 1, "Add")):
                end = graph.op(operator, *dict.fromkeys(interval[side] for interval in every))
                away = graph.op(way, end, graph.op("Mul", graph.op("Abs", end), widened))
                if any(name not in results for name in names):
                    away = infinite
                told.append(graph.op("Reshape", away, graph.ints([1])))
        bounds = graph.op("Concat", *told, axis=0)
        graph.nodes.append(helper.make_node("Where", [proved, bounds, infinite], [NEW_BOUNDS]))

    # The update: before the gate, only to be summed, and behind it.

    def _zero_sum(self) -> onnx.GraphProto:
        nodes = [helper.make_node("Identity", [self._zero], ["proved.sum"])]
        return _branch("proved", nodes, [_info("proved.sum", onnx.TensorProto.FLOAT, ())])

    def _summed(self, results: Sequence[str]) -> onnx.GraphProto:
        """A branch that computes the update, and keeps of it the sum of what is guarded."""
        nodes = _copies(live_nodes(self._update.inside, results), "summed.")
        parts = [f"summed.{name}.sum" for name in results]
        nodes += [
            helper.make_node("ReduceSum", [f"summed.{name}"], [part], keepdims=0)
            for name, part in zip(results, parts, strict=True)
        ]
        nodes.append(helper.make_node("Sum", parts, ["summed.sum"]))
        return _branch("summed", nodes, [_info("summed.sum", onnx.TensorProto.FLOAT, ())])

    def _branches(self) -> onnx.NodeProto:
        """The gate: new state, and whether it was written."""
        sides: dict[str, list[onnx.NodeProto]] = {
            "then": _copies(self._update.inside, "then."),
            "else": [
                helper.make_node("Identity", [f"state.{name}"], [f"else.new.{name}"])
                for name in self._update.cones
            ],
        }
        bodies = {}
        for side, nodes in sides.items():
            infos = []
            for name in self._update.cones:
                info = onnx.ValueInfoProto()
                info.CopyFrom(self._outputs[f"new.{name}"])
                info.name = f"{side}.new.{name}"
                infos.append(info)
            value = numpy_helper.from_array(np.array(side == "then"), f"{side}.value")
            nodes.append(helper.make_node("Constant", [], [f"{side}.done"], value=value))
            infos.append(_info(f"{side}.done", onnx.TensorProto.BOOL, ()))
            bodies[f"{side}_branch"] = _branch(side, nodes, infos)
        outputs = [*(f"new.{name}" for name in self._update.cones), "gate.done"]
        return helper.make_node("If", ["begun"], outputs, **bodies)


def _replace(node: onnx.NodeProto, read: Mapping[str, str], written: Mapping[str, str]) -> None:
    for names, field in ((read, node.input), (written, node.output)):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)


def _copies(nodes: Sequence[onnx.NodeProto], prefix: str) -> list[onnx.NodeProto]:
    """The nodes for a branch, where no name of the outer graph may be given again."""
    names = {name: prefix + name for node in nodes for name in node.output}
    copies = []
    for node in nodes:
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        _replace(copied, names, names)
        copies.append(copied)
    return copies


def _branch(
    name: str, nodes: Sequence[onnx.NodeProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], list(outputs))


def _info(name: str, dtype: int, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def _finished(model: onnx.ModelProto, parts: _Parts) -> onnx.ModelProto:
    outputs = [each for each in model.graph.output if not each.name.startswith("gradient.")]
    place = next(i for i, each in enumerate(outputs) if each.name == "guard") + 1
    shape = (2 * len(parts.kinds),)
    outputs[place:place] = [
        *(_info(name, onnx.TensorProto.BOOL, ()) for name in ("begun", "done")),
        _info(NEW_BOUNDS, onnx.TensorProto.FLOAT, shape),
    ]
    bounds = _info(BOUNDS, onnx.TensorProto.FLOAT, shape)
    nodes = (*parts.outside, *parts.nodes)
    return _rebuilt(model, nodes, outputs, parts.constants, [bounds])


# Of ordinary numbers: how large parameters and optimizer state are taken to be; gradients are 1.
_ORDINARY_PARAMETER = 10.0
_ORDINARY_STATE = 1e4
_ORDINARY_STEP = 10


def _provable(update: _Update, parts: _Parts, hyper: Mapping[str, float]) -> bool:
    """Whether the proof holds for ordinary numbers: else each step would compute its update twice.

    Numbers that depend on a batch are taken to be 1.
    """
    values: dict[str, np.ndarray[Any, Any]] = {
        f"hyper.{name}": np.array(value, np.float32) for name, value in hyper.items()
    }
    values["state.step"] = np.array(_ORDINARY_STEP)
    for name in update.numbers:
        if not update.inputs(name) <= set(values):
            values[name] = np.ones(update.shape(name), np.float32)
    known = []
    for kind in parts.kinds:
        size = _ORDINARY_PARAMETER if kind == "parameter" else _ORDINARY_STATE
        known += [0.0 if kind in parts.never_negative else -size, size]
    values["gate.known"] = np.array(known, np.float32)
    gradients = [name for name in update.leaves if name.startswith("gradient.")]
    values |= {name: np.ones((), np.float32) for name in gradients}
    made = [node for node in (*parts.outside, *parts.nodes) if not set(node.output) & set(values)]
    nodes = live_nodes(made, [parts.proved])
    used = used_names(nodes)
    given = {name: value for name, value in values.items() if name in used}
    graph = helper.make_graph(
        nodes,
        "proof",
        [_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in given.items()],
        [_info(parts.proved, onnx.TensorProto.BOOL, ())],
        [each for each in (*update.initializers, *parts.constants) if each.name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return bool(session.run(None, given)[0])
