"""What a runtime must know about an ONNX file before onnxruntime sees it, without the onnx package.

Field numbers are those of onnx.proto (ONNX IR version 10). Nodes are read wherever they can be:
in the main graph, in subgraphs of any node's attributes, and in model-local functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.parts import ONNX_ELEMENT_TYPES, Dim, Shape

# The protobuf wire format, as much as reading an ONNX file needs.
#
# Written for hostile bytes: every length is checked before it is used, nothing is copied but
# short strings, and a budget bounds the number of fields, hence time and memory. What an honest
# serialiser never writes (groups, a singular field given twice) is refused: other parsers
# resolve it by rules of their own, and a checker must see what the runtime will see.

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass
class Budget:
    """How many more fields may be read."""

    fields: int = 500_000

    def spend(self) -> None:
        """Count one field. Raises ArtifactError once there are too many."""
        self.fields -= 1
        if self.fields < 0:
            raise ArtifactError("ONNX file: more fields than any real train step has")


def fields(data: memoryview, budget: Budget) -> Iterator[tuple[int, int, int | memoryview]]:
    """(field number, wire type, value) of a message, in order; a value is an int or a view."""
    position, end = 0, len(data)
    while position < end:
        budget.spend()
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if number == 0 or number >= 2**29:
            raise ArtifactError("ONNX file: a field number is out of range")
        if wire == VARINT:
            value, position = _varint(data, position)
            yield number, wire, value
            continue
        if wire == BYTES:
            size, position = _varint(data, position)
        elif wire == FIXED64:
            size = 8
        elif wire == FIXED32:
            size = 4
        else:
            raise ArtifactError(f"ONNX file: wire type {wire} is not used by ONNX")
        if size > end - position:
            raise ArtifactError("ONNX file: a field runs past the end of its message")
        yield number, wire, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    end = len(data)
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >= 2**64:
                raise ArtifactError("ONNX file: a number has more than 64 bits")
            return result, position
        shift += 7
    raise ArtifactError("ONNX file: a number is cut off or too long")


def message(wire: int, value: int | memoryview, what: str) -> memoryview:
    """The bytes of an embedded message."""
    if wire != BYTES or not isinstance(value, memoryview):
        raise ArtifactError(f"ONNX file: {what} has the wrong wire type")
    return value


def text(wire: int, value: int | memoryview, what: str, max_bytes: int = 4096) -> str:
    """A UTF-8 string."""
    view = message(wire, value, what)
    if len(view) > max_bytes:
        raise ArtifactError(f"ONNX file: {what} has {len(view)} bytes, more than {max_bytes}")
    try:
        return bytes(view).decode("utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(f"ONNX file: {what} is not UTF-8") from None


def integer(wire: int, value: int | memoryview, what: str) -> int:
    """A signed 64-bit integer."""
    if wire != VARINT or not isinstance(value, int):
        raise ArtifactError(f"ONNX file: {what} has the wrong wire type")
    return value - 2**64 if value >= 2**63 else value


class Once:
    """Refuses a singular field that is given twice in one message."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: set[int] = set()

    def __call__(self, number: int) -> None:
        if number in self._seen:
            raise ArtifactError(f"ONNX file: field {number} of {self._what} is given twice")
        self._seen.add(number)


MAX_NESTING = 16


@dataclass(frozen=True)
class GraphValue:
    """An input or output of the main graph.

    `shape` is None where the file gives no shape; an entry None is a length without name or value.
    """

    name: str
    dtype: str
    shape: Shape | None


@dataclass(frozen=True, slots=True)
class ManyOutputs:
    """A node with more than one output; `name` may be empty."""

    operator: str
    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class IfNode:
    """An ``If`` of the main graph: its inputs (the condition) and outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class OnnxModel:
    """The parts of an ONNX file that a loader checks.

    `operators` counts (domain, operator) pairs everywhere, "" being the default domain.
    `external` holds the file names of tensors that are stored outside the file.
    `ends_in_absent_inputs`: a node's last input has the empty name, where it could be left out.
    """

    opsets: dict[str, int] = field(default_factory=dict)
    operators: dict[tuple[str, str], int] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    inputs: list[GraphValue] = field(default_factory=list)
    outputs: list[GraphValue] = field(default_factory=list)
    initializers: set[str] = field(default_factory=set)
    external: set[str] = field(default_factory=set)
    racing_scatters: int = 0
    many_outputs: list[ManyOutputs] = field(default_factory=list)
    ends_in_absent_inputs: bool = False
    if_nodes: list[IfNode] = field(default_factory=list)


def read_onnx(data: bytes) -> OnnxModel:
    """Read an ONNX file's structure. Raises ArtifactError when the bytes are no such file.

    `racing_scatters` counts the ScatterND nodes with a reduction, whose sum races under several
    threads on onnxruntime's CPU provider.
    """
    reader = _ProtoReader()
    reader.model(memoryview(data))
    return reader.found


class _ProtoReader:
    def __init__(self) -> None:
        self.found = OnnxModel()
        self.budget = Budget()

    def model(self, data: memoryview) -> None:
        once = Once("the model")
        has_graph = False
        for number, wire, value in fields(data, self.budget):
            if number == 7:
                once(number)
                has_graph = True
                self.graph(message(wire, value, "graph"), depth=0)
            elif number == 8:
                self.opset(message(wire, value, "opset import"))
            elif number == 20:
                raise ArtifactError("ONNX file: training info is not allowed in an artifact")
            elif number == 25:
                self.function(message(wire, value, "function"))
        if not has_graph:
            raise ArtifactError("ONNX file: it holds no graph")

    def opset(self, data: memoryview) -> None:
        once, domain, version = Once("an opset import"), "", 0
        for number, wire, value in fields(data, self.budget):
            once(number)
            if number == 1:
                domain = _domain(text(wire, value, "opset domain"))
            elif number == 2:
                version = integer(wire, value, "opset version")
        if domain in self.found.opsets:
            raise ArtifactError(f"ONNX file: opset of domain {domain!r} is given twice")
        self.found.opsets[domain] = version

    def graph(self, data: memoryview, depth: int) -> None:
        if depth > MAX_NESTING:
            raise ArtifactError(f"ONNX file: graphs are nested more than {MAX_NESTING} deep")
        for number, wire, value in fields(data, self.budget):
            if number == 1:
                self.node(message(wire, value, "node"), depth)
            elif number == 5:
                name = self.tensor(message(wire, value, "initializer"))
                if depth == 0:
                    self.found.initializers.add(name)
            elif number == 15:
                name = self.sparse_tensor(message(wire, value, "sparse initializer"))
                if depth == 0:
                    self.found.initializers.add(name)
            elif number in (11, 12) and depth == 0:
                side = self.found.inputs if number == 11 else self.found.outputs
                side.append(self.value_info(message(wire, value, "graph input or output")))

    def function(self, data: memoryview) -> None:
        once, name = Once("a function"), ""
        for number, wire, value in fields(data, self.budget):
            if number == 1:
                once(number)
                name = text(wire, value, "function name")
            elif number == 7:
                self.node(message(wire, value, "node"), depth=0)
            elif number == 11:
                self.attribute(message(wire, value, "attribute"), depth=0)
        self.found.functions.append(name)

    def node(self, data: memoryview, depth: int) -> None:
        once, operator, domain, reduction = Once("a node"), "", "", "none"
        label, absent = "", False
        inputs: list[memoryview] = []
        outputs: list[memoryview] = []
        for number, wire, value in fields(data, self.budget):
            if number in (3, 4, 7):
                once(number)
            if number == 1:
                inputs.append(message(wire, value, "node's input"))
                absent = not inputs[-1]
            elif number == 2:
                outputs.append(message(wire, value, "node's output"))
            elif number == 3:
                label = text(wire, value, "node's name")
            elif number == 4:
                operator = text(wire, value, "operator")
            elif number == 7:
                domain = _domain(text(wire, value, "operator's domain"))
            elif number == 5:
                name, string = self.attribute(message(wire, value, "attribute"), depth)
                if name == "reduction":
                    reduction = string
        key = (domain, operator)
        self.found.operators[key] = self.found.operators.get(key, 0) + 1
        if operator == "ScatterND" and reduction != "none":
            self.found.racing_scatters += 1
        given = sum(map(bool, outputs))
        if given > 1:
            self.found.many_outputs.append(ManyOutputs(operator, label, given))
        if operator == "If" and depth == 0:
            names = [[text(BYTES, n, "value's name") for n in side] for side in (inputs, outputs)]
            self.found.if_nodes.append(IfNode(*map(tuple, names)))
        self.found.ends_in_absent_inputs |= absent

    def attribute(self, data: memoryview, depth: int) -> tuple[str, str]:
        once, name, string = Once("an attribute"), "", ""
        for number, wire, value in fields(data, self.budget):
            if number in (1, 4, 5, 6, 22):
                once(number)
            if number == 1:
                name = text(wire, value, "attribute name")
            elif number == 4 and name == "reduction":
                string = text(wire, value, "attribute 'reduction'")
            elif number in (5, 10):
                self.tensor(message(wire, value, "tensor"))
            elif number in (6, 11):
                self.graph(message(wire, value, "graph"), depth + 1)
            elif number in (22, 23):
                self.sparse_tensor(message(wire, value, "sparse tensor"))
        return name, string

    def tensor(self, data: memoryview) -> str:
        once, name, external, location = Once("a tensor"), "", False, None
        for number, wire, value in fields(data, self.budget):
            if number == 8:
                once(number)
                name = text(wire, value, "tensor name")
            elif number == 14:
                once(number)
                external = integer(wire, value, "data location") != 0
            elif number == 13:
                key, entry = self.key_value(message(wire, value, "external data"))
                if key == "location":
                    if location is not None:
                        raise ArtifactError("ONNX file: a tensor has two external locations")
                    location = entry
        if external or location is not None:
            self.found.external.add(location or "")
        return name

    def sparse_tensor(self, data: memoryview) -> str:
        name = ""
        for number, wire, value in fields(data, self.budget):
            if number in (1, 2):
                found = self.tensor(message(wire, value, "sparse tensor's part"))
                name = found if number == 1 else name
        return name

    def key_value(self, data: memoryview) -> tuple[str, str]:
        once, key, entry = Once("an entry"), "", ""
        for number, wire, value in fields(data, self.budget):
            once(number)
            if number == 1:
                key = text(wire, value, "entry's key")
            elif number == 2:
                entry = text(wire, value, "entry's value")
        return key, entry

    def value_info(self, data: memoryview) -> GraphValue:
        once, name, kind = Once("a graph input or output"), "", None
        for number, wire, value in fields(data, self.budget):
            if number == 1:
                once(number)
                name = text(wire, value, "name")
            elif number == 2:
                once(number)
                kind = self.type(message(wire, value, "type"), name)
        if kind is None:
            raise ArtifactError(f"ONNX file: graph input or output {name!r} has no type")
        return GraphValue(name, *kind)

    def type(self, data: memoryview, name: str) -> tuple[str, Shape | None]:
        found = None
        for number, wire, value in fields(data, self.budget):
            if number == 1 and found is None:
                found = self.tensor_type(message(wire, value, "tensor type"), name)
            elif number != 6:
                raise ArtifactError(f"ONNX file: {name!r} is not a plain tensor")
        if found is None:
            raise ArtifactError(f"ONNX file: {name!r} has no tensor type")
        return found

    def tensor_type(self, data: memoryview, name: str) -> tuple[str, Shape | None]:
        once, element, shape = Once("a tensor type"), 0, None
        for number, wire, value in fields(data, self.budget):
            once(number)
            if number == 1:
                element = integer(wire, value, "element type")
            elif number == 2:
                shape = self.shape(message(wire, value, "shape"))
        if element not in ONNX_ELEMENT_TYPES:
            raise ArtifactError(
                f"ONNX file: {name!r} has element type {element}, which is not used"
            )
        return ONNX_ELEMENT_TYPES[element], shape

    def shape(self, data: memoryview) -> Shape:
        dims: list[Dim] = []
        for number, wire, value in fields(data, self.budget):
            if number == 1:
                dims.append(self.dimension(message(wire, value, "dimension")))
        return tuple(dims)

    def dimension(self, data: memoryview) -> Dim:
        dim: Dim = None
        for number, wire, value in fields(data, self.budget):
            if number not in (1, 2):
                continue
            if dim is not None:
                raise ArtifactError("ONNX file: a dimension has two lengths")
            dim = integer(wire, value, "length") if number == 1 else text(wire, value, "axis")
        return dim


def _domain(name: str) -> str:
    # The specification gives the default domain two spellings.
    return "" if name == "ai.onnx" else name
